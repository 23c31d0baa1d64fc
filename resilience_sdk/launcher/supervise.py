"""The job-level loop: runs a command again until training is complete or another run cannot help.

It leads a session of its own, so that each signal reaches it from us, as often as we got it, and everything it
started can be found. If the supervisor is killed, the kernel asks the command to leave.

It is what a launcher script does around NVIDIA's `ft_launcher` (`FAULT_TOL_FINISHED_FLAG_FILE`), with an answer to
*why* a run ended. What a run left in its directory tells more than its exit code: a flag, an outcome, checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.core import environ
from resilience_sdk.core.atomic_write import Version, version_of
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.early_signals import job_has_begun
from resilience_sdk.core.journal import CURVES, Event, Journal, read_journal
from resilience_sdk.core.lease import STALE_AFTER_S, current_holder
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings.parse import signal_name
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.history.exclusion import LeftOut, nodes_to_leave_out
from resilience_sdk.history.suspects import SUSPECT_FOR_S
from resilience_sdk.incidents import count_words
from resilience_sdk.launcher import ranks
from resilience_sdk.launcher.requeue_policy import IDLE_BELOW_S, RunEnd, decide_next
from resilience_sdk.launcher.restart_policy import Decision
from resilience_sdk.launcher.signals import HABITS, LeaveRequested, SignalInbox
from resilience_sdk.postmortem.exit_codes import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE, JobVerdict
from resilience_sdk.postmortem.outcome import to_resume
from resilience_sdk.system.hostinfo import boot_id, host_name, process_start_ticks
from resilience_sdk.system.linux import die_with_parent

_LOOK_S = 0.05
_TICK_S = 1.0
_CTRL_C_NOW = 3  # the first asks, the second hurries, the third ends it


def find_program(word: str) -> None:
    """Look for the program of a command, before anything is made for it; raises ConfigError where there is none."""
    if shutil.which(word) is None:
        why = "cannot be executed: no permission" if os.path.exists(word) else "command not found"
        raise ConfigError(f"{word}: {why}; check the words after --")


class SupervisedCommand:
    """One run of the command. Main thread only."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], inbox: SignalInbox, *, patience_s: float) -> None:
        """Start it. `patience_s` is how long it may take to leave, in seconds from the first signal passed on.

        Raises:
            ConfigError: There is no such program, or it may not be executed.
        """
        self._inbox = inbox
        self._patience_s = patience_s
        self._passed_on = 0  # how many of the inbox's signals
        self._until: float | None = None  # on the monotonic clock, once it was asked to leave
        self._killed = False
        try:
            self._process = subprocess.Popen(
                words,
                env=dict(env),
                # Its session has no terminal, so reading from one would fail in odd ways; this fails plainly.
                stdin=subprocess.DEVNULL if _is_terminal() else None,
                start_new_session=True,
                preexec_fn=_leave_with_parent,  # one thread here, and only a system call
            )
        except FileNotFoundError:
            raise ConfigError(f"{words[0]}: command not found; check the words after --") from None
        except OSError as error:
            raise ConfigError(f"{words[0]}: cannot be executed: {error.strerror}; check the words after --") from None
        self._born = process_start_ticks(self._process.pid)

    @property
    def asked_to_leave(self) -> bool:
        """Tell whether a signal was passed on."""
        return self._until is not None

    def wait(self) -> int:
        """Wait for its end, passing on signals; return its exit code, negative for a signal."""
        with contextlib.ExitStack() as stack:
            fds = [self._inbox.wakeup]
            if (pidfd := _pidfd(self._process.pid)) is not None:
                stack.callback(os.close, pidfd)
                fds.append(pidfd)
            while (code := self._process.poll()) is None:
                self._forward()
                if self._is_time_over():
                    self._kill()
                select.select(fds, [], [], _TICK_S if pidfd is not None else _LOOK_S)
                self._inbox.drain()
        return code

    def end_rest(self, grace_s: float) -> None:
        """End what is left of its session after it failed: SIGTERM, up to `grace_s` seconds, SIGKILL.

        A wrapper may die at once of a signal while the job inside it still saves.
        """
        pid = self._process.pid
        if not ranks.any_left(pid, self._born):
            return
        say(f"supervise: the command ended, its processes have {grace_s:.0f} s to follow")
        if not self.asked_to_leave:
            self._kill_group(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while ranks.any_left(pid, self._born) and time.monotonic() < deadline and not self._is_time_over():
            self._forward()
            time.sleep(_LOOK_S)
        ranks.kill_members({pid: self._born})

    def _forward(self) -> None:
        """Pass on every signal that has come since the last look."""
        for number in self._inbox.arrived[self._passed_on :]:
            if self._until is None:
                self._until = time.monotonic() + self._patience_s
                say(
                    f"supervise: {signal_name(number)}: passed on to the command, which is not run again; it has "
                    f"{self._patience_s:.0f} s to leave"
                )
            self._passed_on += 1
            self._kill_group(number)

    def _is_time_over(self) -> bool:
        if self._until is None:
            return False
        return time.monotonic() > self._until or self._inbox.interrupts >= _CTRL_C_NOW

    def _kill(self) -> None:
        """End the command and all that it started, at once."""
        late = self._inbox.interrupts < _CTRL_C_NOW
        if not self._killed:
            say(f"supervise: {f'it has not left within {self._patience_s:.0f} s' if late else 'Ctrl-C'}: SIGKILL")
        self._killed = True
        self._process.kill()
        self._kill_group(signal.SIGKILL)
        ranks.kill_members({self._process.pid: self._born})

    def _kill_group(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)


def _leave_with_parent() -> None:
    die_with_parent(signal.SIGTERM)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable when the process has ended, where the kernel has such a thing."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _is_terminal() -> bool:
    try:
        return os.isatty(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return False


_OUTCOME_S = 2.0  # under a foreign launcher the monitor writes it, a moment after the launcher's end
_LEASE_MARGIN_S = 5.0
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", *HABITS)


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

    def child_environment(self, left_out: str) -> dict[str, str]:
        """Return the environment of the command: the same run directory and finished flag for every run of it.

        `left_out` are the nodes that this run had better not be on; what the user has named there stays.
        """
        env = {**self.env, environ.RUN_DIR: str(self.run_dir.path)}
        env.setdefault(environ.FINISHED_FLAG_FILE, str(self.run_dir.finished))
        env.setdefault(environ.EXCLUDE_NODES, left_out)
        return env

    def nodes_to_leave_out(self) -> LeftOut:
        """Return the nodes that the history suspects, or that the last verdict blames; what fails leaves out none."""
        return nodes_to_leave_out(self.run_dir.path, self.env, since=time.time() - SUSPECT_FOR_S)

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
        with SignalInbox(_SIGNALS, notices=supervision.signals) as inbox:
            job_has_begun()
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
            try:
                self.history.append(self._run())
            except LeaveRequested:
                return self._leave_between_runs()
            step = decide_next(self.history, self.job.max_retries, self.job.first_delay_s)
            self._tell(step)
            if not step.restarts:
                return step.exit_code
            self.inbox.sleep(step.delay_s)

    def _run_once(self) -> RunEnd:
        """Run the command once. Raises LeaveRequested where a signal comes before it is started."""
        job, number = self.job, len(self.history) + 1
        with self.inbox.raising():  # a database that does not answer, a journal of gigabytes
            before, seen = version_of(job.run_dir.outcome), self._look()
            left_out = job.nodes_to_leave_out()
        if left_out.reasons:
            say(f"supervise: to be left out ({environ.EXCLUDE_NODES}={left_out.hostlist}): {left_out.told}")
        for warning in left_out.warnings:
            say(f"supervise: warning: {warning}")
        if left_out.problem is not None:
            say_once("history", f"supervise: {left_out.problem}")
        clock = time.monotonic()
        env = job.child_environment(left_out.hostlist)
        try:
            command = SupervisedCommand(job.command, env, self.inbox, patience_s=job.patience_s)
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
        told = _told_end(code, job.run_dir.outcome, before, wait=began)
        return RunEnd(
            code=told.code,
            stood=told.stood,
            free=told.free,
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
        contents = read_journal(self.job.run_dir.journal, without=CURVES)
        events = [event for event in contents.events if event.get("job") != self.key]
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
        verdict = JobVerdict.INTERRUPTED if interrupted else JobVerdict.PREEMPTED
        reason = "interrupted by the user" if interrupted else "the job was asked to leave"
        self._tell(Decision(verdict, f"{reason} ({self.inbox.name}) while the command did not run"))
        return verdict.exit_code

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
            say(f"supervise: {to_resume(step.verdict, again, self.best)}", wrap=False)
        if step.verdict is JobVerdict.HARDWARE and (found := self.job.nodes_to_leave_out()).reasons:
            say(f"supervise: leave out {found.hostlist}: {found.told}")


def _kept(step: int | None) -> str:
    if step is None:
        return "no checkpoint of the SDK to resume from"
    return f"from the checkpoint after {count_words(step)}"


@attrs.frozen
class _Told:
    """How a job ended, as its exit code and what it has left say."""

    code: int
    stood: str | None = None
    free: bool = False


def _told_end(code: int, outcome: Path, before: Version | None, *, wait: bool) -> _Told:
    """Return how the job ended: its code is the command's, unless that one hides what this run's outcome tells.

    torchrun leaves with 1 whatever happened, and with 0 when all ranks stopped at an agreed step.
    """
    if code not in (EXIT_FINISHED, EXIT_FAILED):
        return _Told(code)
    deadline = time.monotonic() + (_OUTCOME_S if wait and code == EXIT_FAILED else 0.0)
    while (now := version_of(outcome)) in (None, before) and time.monotonic() < deadline:
        time.sleep(0.02)
    if now in (None, before):
        return _Told(code)
    try:
        found: Any = json.loads(read_text(outcome))
        told, stood, free = found["exit_code"], found.get("stood"), found.get("free") is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Told(code)
    told = told if type(told) is int and told != EXIT_FINISHED else code
    return _Told(told, stood if isinstance(stood, str) else None, free)
