"""The job-level loop: runs a command again until training is complete or another run cannot help.

It is what a launcher script does around NVIDIA's `ft_launcher` (`FAULT_TOL_FINISHED_FLAG_FILE`), with an answer to
*why* a run ended. What a run left in its directory tells more than its exit code: a flag, an outcome, checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import environ
from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.console import say
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.events import Event
from resilience_sdk.hostinfo import boot_id, host_name, process_start_ticks
from resilience_sdk.incidents import count_words
from resilience_sdk.journal import Journal, read_journal, redact_argv
from resilience_sdk.launcher.decision import Decision
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.launcher.supervise_command import SupervisedCommand
from resilience_sdk.launcher.supervise_rules import EXIT_USAGE, IDLE_BELOW_S, RunEnd, decide_next
from resilience_sdk.lease import STALE_AFTER_S, current_holder
from resilience_sdk.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, Verdict, to_resume
from resilience_sdk.run_directory import RunDirectory

_OUTCOME_S = 2.0  # under a foreign launcher the monitor writes it, a moment after the launcher's end
_LEASE_MARGIN_S = 5.0
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@attrs.frozen
class Supervision:
    """What to run, where, and how often. Durations are seconds."""

    command: tuple[str, ...]
    run_dir: RunDirectory
    max_retries: int
    first_delay_s: float
    grace_s: float  # what is left of a failed command has this long to go
    patience_s: float  # a command that was asked to leave has this long, all of its own graces in it
    signals: tuple[str, ...] = ()  # that mean: leave, beside the usual ones
    env: Mapping[str, str] = attrs.field(factory=environ.environment)

    def child_environment(self) -> dict[str, str]:
        """Return the environment of the command: the same run directory and finished flag for every run of it."""
        env = {**self.env, environ.RUN_DIR: str(self.run_dir.path)}
        env.setdefault(environ.FINISHED_FLAG_FILE, str(self.run_dir.finished))
        return env

    def is_finished(self) -> bool:
        """Tell whether one of the flags says that training is complete."""
        flag = self.env.get(environ.FINISHED_FLAG_FILE)
        return self.run_dir.is_finished() or bool(flag and Path(flag).exists())


def supervise(supervision: Supervision) -> int:
    """Run the command until it needs no further run; return the exit code (the contract's). Main thread only.

    Raises:
        ConfigError: There is no such command.
    """
    if supervision.is_finished():
        say(f"supervise: {supervision.run_dir.path} is finished: training is complete, nothing to do")
        return EXIT_FINISHED
    key = f"supervise-{os.getpid()}-{process_start_ticks(os.getpid()) or 0}-{host_name()}"
    journal = Journal(supervision.run_dir.journal, writer="supervisor", host=host_name(), boot_id=boot_id(), job=key)
    try:
        with SignalInbox(dict.fromkeys((*_SIGNALS, *supervision.signals))) as inbox:
            return _Loop(supervision, inbox, journal, key).run()
    finally:
        journal.close()


@attrs.frozen
class _Seen:
    """How many events the journal holds that are not ours, and how many of them tell of an agreed stop."""

    events: int
    stops: int


@attrs.define
class _Loop:
    """The runs so far, and the one that is on."""

    job: Supervision
    inbox: SignalInbox
    journal: Journal
    key: str
    history: list[RunEnd] = attrs.field(factory=list)
    best: int | None = None  # newest checkpoint ever seen: one that is lost again is no progress twice

    def run(self) -> int:
        self.best = newest_checkpoint(self.job.run_dir)
        say(f"supervise: run directory {self.job.run_dir.path}")
        while True:
            if self.inbox.request is not None:
                return self._leave_between_runs()
            self.history.append(self._run())
            step = decide_next(self.history, self.job.max_retries, self.job.first_delay_s)
            self._tell(step)
            if not step.restarts:
                return step.exit_code
            self.inbox.sleep(step.delay_s)

    def _run_once(self) -> RunEnd:
        job, number = self.job, len(self.history) + 1
        before, seen = _stamp(job.run_dir.outcome), self._look()
        clock = time.monotonic()
        try:
            command = SupervisedCommand(job.command, job.child_environment(), self.inbox, patience_s=job.patience_s)
        except ConfigError as error:
            if number == 1:
                raise
            # It was there before: a file system that is away for a while, and so worth a retry.
            say(f"supervise: {error}")
            return RunEnd(127)
        code = command.wait()
        lasted_s = time.monotonic() - clock
        if code != EXIT_FINISHED:
            command.end_rest(job.grace_s)
        now = self._look()
        began = now.events > seen.events
        if code == EXIT_PREEMPTED:
            # A request that was obeyed must not stop the next run too.
            with contextlib.suppress(OSError):
                job.run_dir.preempt.unlink()
        newest = newest_checkpoint(job.run_dir)
        progressed = newest is not None and (self.best is None or newest > self.best)
        self.best = newest if progressed else self.best
        return RunEnd(
            code=_told_code(code, job.run_dir.outcome, before, wait=began),
            lasted_s=lasted_s,
            finished=job.is_finished(),
            stop_agreed=now.stops > seen.stops,
            asked_to_leave=command.asked_to_leave and not self.inbox.interrupted,
            interrupted=command.asked_to_leave and self.inbox.interrupted,
            progressed=progressed,
            began=began or lasted_s >= IDLE_BELOW_S,
        )

    def _look(self) -> _Seen:
        """Count what the command's processes have journalled: by number and not by time, as hosts differ in that."""
        events = [event for event in read_journal(self.job.run_dir.journal).events if event.get("job") != self.key]
        return _Seen(len(events), sum(event["event"] == Event.STOP_AGREED.value for event in events))

    def _run(self) -> RunEnd:
        """Run the command; where a launcher was refused because a dead job's lease had not ended, once more then.

        The launcher decides whether the directory is in use: it knows whether another node's launcher is of its own
        job, and we do not.
        """
        deadline = time.monotonic() + STALE_AFTER_S + _LEASE_MARGIN_S
        while True:
            end = self._run_once()
            holder = current_holder(self.job.run_dir)
            if end.code != EXIT_USAGE or holder is None:
                return end
            end = attrs.evolve(end, refused_by=f"{holder.job} (host {holder.host}, pid {holder.pid})")
            if holder.is_another_here() or time.monotonic() > deadline:
                return end
            say(
                f"supervise: the run directory is held by job {holder.job} on {holder.host}; if that one is dead, its "
                f"lease ends within {STALE_AFTER_S:.0f} s: waiting"
            )
            while self.inbox.request is None and current_holder(self.job.run_dir) is not None:
                if time.monotonic() > deadline:
                    break
                self.inbox.sleep(1.0)
            if self.inbox.request is not None:
                left = self.inbox.interrupted
                return attrs.evolve(end, interrupted=left, asked_to_leave=not left)

    def _leave_between_runs(self) -> int:
        interrupted = self.inbox.interrupted
        code = EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED
        verdict = Verdict.INTERRUPTED if interrupted else Verdict.PREEMPTED
        reason = "interrupted by the user" if interrupted else "the job was asked to leave"
        self._tell(Decision(verdict, code, f"{reason} while the command did not run", 0))
        return code

    def _tell(self, step: Decision) -> None:
        self.journal.emit(
            Event.DECISION,
            what="supervise",
            run=len(self.history),
            code=self.history[-1].code if self.history else None,
            argv=redact_argv(self.job.command),
            verdict=step.verdict.value,
            exit_code=None if step.restarts else step.exit_code,
            reason=step.reason,
            retries_left=step.restarts_left,
            delay_s=step.delay_s,
        )
        run = f"run {len(self.history)}" if self.history else "before the first run"
        if step.restarts:
            wait = f" in {step.delay_s:g} s" if step.delay_s else ""
            say(f"supervise: {run}: {step.reason}; running it again{wait} ({_kept(self.best)})")
            return
        say(f"supervise: {run}: {step.reason} (exit code {step.exit_code})")
        if step.exit_code not in (EXIT_FINISHED, EXIT_USAGE):
            words = shlex.join(redact_argv(self.job.command))
            again = f"resilience supervise --run-dir {self.job.run_dir.path} -- {words}"
            say(f"supervise: {to_resume(step.verdict, again)}", wrap=False)


def _kept(step: int | None) -> str:
    if step is None:
        return "no checkpoint of the SDK to resume from"
    return f"from the checkpoint after {count_words(step)}"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced, None when there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_ino


def _told_code(code: int, outcome: Path, before: tuple[int, int] | None, *, wait: bool) -> int:
    """Return the exit code of the job: the command's, unless that one hides what this run's outcome tells.

    torchrun leaves with 1 whatever happened, and with 0 when all ranks stopped at an agreed step.
    """
    if code not in (EXIT_FINISHED, EXIT_FAILED):
        return code
    deadline = time.monotonic() + (_OUTCOME_S if wait and code == EXIT_FAILED else 0.0)
    while (now := _stamp(outcome)) in (None, before) and time.monotonic() < deadline:
        time.sleep(0.02)
    if now in (None, before):
        return code
    try:
        told: Any = json.loads(outcome.read_text())["exit_code"]
    except (OSError, ValueError, KeyError, TypeError):
        return code
    return told if type(told) is int and told != EXIT_FINISHED else code
