"""Deaths and outcomes under a launcher that is not ours: the monitor alone can tell who went first."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.attribution.exits import describe_exit, exit_fields
from resilience_sdk.attribution.first_death import FirstDeath
from resilience_sdk.core import console, environ
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import CURVES, Event, Journal, read_journal
from resilience_sdk.core.json_records import from_text
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings.parse import signal_name
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.incidents import (
    STALL,
    Evidence,
    Incident,
    IncidentStore,
    standing_words,
)
from resilience_sdk.incidents.record import one_line
from resilience_sdk.monitor.pending_exceptions import read_exception
from resilience_sdk.monitor.ranks import WatchedRank, exit_code, is_clean
from resilience_sdk.postmortem.crash import crash_incident, first_death
from resilience_sdk.postmortem.cut_saves import find_cut
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.facts import (
    ENDING_SUFFIX,
    LEAVE_SIGNALS,
    UNSAVED,
    AttemptFacts,
    AttemptJournal,
    EndedBy,
    EndingRequest,
    RankExit,
    RankTrace,
    unix_s,
    written_ns,
)
from resilience_sdk.postmortem.outcome import FROM_OUTSIDE, Outcome, record, record_standing, write_outcome
from resilience_sdk.postmortem.preemption import Account, account, completed_steps, lost_words
from resilience_sdk.postmortem.recovery import close_warnings
from resilience_sdk.preemption.reasons import Asker
from resilience_sdk.system import hostinfo

_MOST_CHARACTERS = 4096
_THE_SAME = "<the same command>"


def verdict_of(
    final: Sequence[WatchedRank], stop: Account, *, left: bool, fault: str | None, final_words: str | None = None
) -> tuple[JobVerdict, str]:
    """Return verdict and reason of a job from the ranks of its last attempt.

    `stop` is what is known of a stop of that attempt; `left`: it was found to have ended by one; `fault`: what was
    found to have ended it otherwise, in words; `final_words`: why it is not to be started again.
    """
    codes = [code for watched in final if (code := exit_code(watched)) is not None]
    clean = all(is_clean(watched) for watched in final)
    if (clean and stop.is_agreed) or EXIT_PREEMPTED in codes or left:
        left_all = all(is_clean(watched) or exit_code(watched) == EXIT_PREEMPTED for watched in final)
        if stop.stood is not None and not left_all:  # a retry of it is to count
            return JobVerdict.GIVE_UP, stop.reason()
        return JobVerdict.PREEMPTED, stop.reason()
    if clean:
        return JobVerdict.FINISHED, "all ranks ended well"
    if any(code == -2 for code in codes):
        lost = lost_words(completed_steps(watched.snapshot for watched in final), stop.saved)
        stood = "" if stop.stood is None else f"{stop.stood}; then "
        return JobVerdict.INTERRUPTED, f"{stood}interrupted by the user; {lost}"
    if final_words is not None:
        return JobVerdict.STOP, final_words
    if stop.stood is not None:
        return JobVerdict.GIVE_UP, f"{stop.stood}; then it was ended{'' if fault is None else f': {fault}'}"
    return JobVerdict.GIVE_UP, fault or "a rank did not end well"


def saved_step(config: JobConfig) -> int | None:
    """Return the newest step that can be resumed from."""
    from resilience_sdk.checkpoint.newest import newest_checkpoint  # late: a megabyte, and only at the end of a job

    return newest_checkpoint(RunDirectory(Path(config.run_dir)))


def resume_command(config: JobConfig) -> str:
    """Return the command line that goes on in the same run directory, without secrets.

    The launcher's where that is a Python program, such as torchrun, and the rank's own where it was started by itself;
    what a shell or a scheduler ran cannot be read from its process. Call it while they live.
    """
    pid, ticks = config.parent_pid, config.parent_ticks
    if not pid:
        pid, ticks = config.creator_pid, config.creator_ticks
    words = _command_line(pid) if not hostinfo.process_is_gone(pid, ticks or None) else []
    is_python = bool(words) and os.path.basename(words[0]).startswith("python")
    shown = shlex.join(redact_argv(words)) if is_python else _THE_SAME
    if len(shown) > _MOST_CHARACTERS:
        shown = _THE_SAME
    return f"{environ.RUN_DIR}={shlex.quote(config.run_dir)} {shown}"


def _command_line(pid: int) -> list[str]:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return data.decode(errors="replace").split("\0")[:-1]


_WAIT_FOR_PEERS_S = 1.0  # deaths within this time belong together
_TEARDOWN_SIGNALS = (-15, -2, -1)
_KILLED_EARLY_S = 2.0  # the grace of who kills may have begun before ours


@attrs.frozen
class HangEnd:
    """What is known of an ending for a hang: whether it costs nothing of a budget, and why it is the last."""

    free: bool = False
    final: str | None = None


class DeathWatch:
    """Explains the deaths of ranks whose exit codes go to somebody else."""

    def __init__(self, config: JobConfig, store: IncidentStore, journal: Journal, node: str) -> None:
        """Write incidents into `store` and the end of the job into the run directory."""
        self._config = config
        self._store = store
        self._journal = journal
        self._node = node
        self._done: set[int] = set()
        self._left: set[int] = set()  # attempts that ended because the job was asked to leave
        self._stood: dict[int, str] = {}  # by attempt: what stood still when somebody ended it
        self._hung: dict[int, HangEnd] = {}  # by attempt: how a hang that was reported ended it
        self._started_at = time.time()
        self._resume = resume_command(config)

    def note(self, died: Sequence[WatchedRank]) -> None:
        """Journal each death as it is seen."""
        for watched in died:
            self._journal.emit(
                Event.RANK_EXIT,
                rank=watched.rank,
                pid=watched.snapshot.pid,
                **exit_fields(exit_code(watched)),
                exit_state=watched.snapshot.exit_state,
                step=watched.snapshot.last_step if is_clean(watched) else watched.snapshot.step,
                step_is_global=watched.snapshot.step_is_global,
                completed=watched.snapshot.completed_beats,
            )

    def explained(self, attempt: int | None, *, free: bool = False, final: str | None = None) -> None:
        """Note that the deaths of an attempt are the end of a hang that was reported.

        `free`: it costs nothing of a budget; `final`: why nobody should start the job again.
        """
        if attempt is not None:
            self._done.add(attempt)
            self._hung[attempt] = HangEnd(free, final)

    def conclude(self, ranks: Sequence[WatchedRank], *, everything: bool = False) -> None:
        """Write the incident of an attempt in which a rank died of its own, when its peers had time to follow."""
        dead = [watched for watched in ranks if not watched.alive]
        if dead and any(not is_clean(watched) for watched in dead):
            first_ns = min(watched.died_ns or 0 for watched in dead if not is_clean(watched))
            complete = len(dead) == len(ranks) or time.monotonic_ns() - first_ns > _WAIT_FOR_PEERS_S * 1e9
            attempt = ranks[0].snapshot.attempt
            if (complete or everything) and attempt not in self._done:
                self._done.add(attempt)
                self._explain(attempt, ranks)
        if everything and ranks:
            self._write_outcome(ranks)

    def _explain(self, attempt: int, ranks: Sequence[WatchedRank]) -> None:
        """Write the incident of an attempt in which a rank did not end well: it failed, or left as it was asked."""
        facts = self._facts(attempt, ranks)
        clean = {watched.rank for watched in ranks if not watched.alive and is_clean(watched)}
        first = min(
            (end for end in facts.exits if end.rank not in clean),
            key=lambda end: (end.at_ns, end.exit_code != EXIT_PREEMPTED),
        )
        # From the first of them on, the foreign launcher ends the others: their deaths by its signal say nothing.
        leaves = first.exit_code == EXIT_PREEMPTED
        facts = attrs.evolve(facts, ending_ns=first.at_ns if leaves else first.at_ns + 1)
        death = first_death(facts)
        raised = facts.traces[first.rank].exception is not None
        if (leaves and not death.culprits) or self._was_asked_in_vain(facts, first, raised=raised):
            self._write_preemption(facts, first)
        elif first.exit_code in _TEARDOWN_SIGNALS or self._asked(facts, first):
            # The launcher, the scheduler or a person ended the job.
            stood = self._stood_still(facts, unix_s(first.at_ns), _end_words(first))
            self._say_stood(attempt, stood)
            if stood is None and (asked := self._asked(facts, first)):
                self._write_asked(facts, first, asked)
        else:
            culprits = death.culprits or (() if raised else (first.rank,))
            exceptions = [exception for rank in culprits if (exception := facts.traces[rank].exception)]
            if exceptions and self._store.bad_numbers(attempt, facts.began_at, str(exceptions[0].get("type"))):
                return  # the ranks have told of it
            stood = None
            if not culprits or death.classification.cause in FROM_OUTSIDE or first.exit_code is None:
                stood = self._stood_still(facts, unix_s(first.at_ns), _end_words(first))
                self._say_stood(attempt, stood)
            victims = tuple(sorted({watched.rank for watched in ranks} - set(culprits)))
            self._write_crash(facts, attrs.evolve(death, culprits=culprits, victims=victims), stood)

    def _facts(self, attempt: int, ranks: Sequence[WatchedRank]) -> AttemptFacts:
        """Return what is known of an attempt from its ranks' pages and files, and of those that are dead."""
        began, codes, traces = self._began_at(), {}, {}
        for watched in ranks:
            page, code = watched.snapshot, exit_code(watched)
            codes[watched.rank] = 0 if code is None and page.exit_state == "clean" else code
            exception = read_exception(watched.stem, codes[watched.rank])
            traces[watched.rank] = RankTrace(
                watched.rank,
                page.pid,
                page,
                exception,
                None,
                _stacks(watched),
                request=_request(watched),
                stacks_ns=written_ns(Path(f"{watched.stem}.stack")),
            )
        dead = sorted((watched for watched in ranks if not watched.alive), key=lambda watched: watched.died_ns or 0)
        exits = tuple(
            RankExit(
                rank=watched.rank,
                local_rank=watched.snapshot.local_rank,
                pid=watched.snapshot.pid,
                exit_code=codes[watched.rank],
                order=order,
                at_ns=watched.died_ns or 0,
                ended_by_us=False,
            )
            for order, watched in enumerate(dead)
        )
        journal = AttemptJournal(Path(self._config.run_dir) / "journal", None, attempt, began_at=began)
        return AttemptFacts(attempt, self._node, exits, traces, EndedBy.RANKS, began_at=began, journal=journal)

    def _stood_still(self, facts: AttemptFacts, at: float, by: str) -> Incident | None:
        """Write down what stood still when the attempt was ended, at the time `at`, and return it."""
        hang = record_standing(self._store, self._journal, facts, at, by)
        if hang is not None:
            self._stood[facts.attempt] = standing_words(hang)
        return hang

    def _say_stood(self, attempt: int, hang: Incident | None) -> None:
        if hang is not None:
            console.say(f"HANG: {self._stood[attempt]}; {hang.evidence[-1].text}")
            self._say_report(hang)

    def _asked(self, facts: AttemptFacts, first: RankExit) -> tuple[RankExit, ...]:
        """Return the ranks that died of a signal that asks to leave, where that is why the attempt ended.

        A launcher also ends its ranks so because another node's have failed, which the monitor there reports.
        """
        page = facts.pages.get(first.rank)
        if first.exit_code is None or -first.exit_code not in LEAVE_SIGNALS or (page is not None and page.checks):
            return ()  # one that listens dies of a signal only where that is part of a teardown
        explained = self._store.of_attempt(facts.attempt, facts.began_at, "crash", "hang")
        if any(map(_ended_it, explained)):
            return ()
        return tuple(end for end in facts.exits if end.died_asked())

    def _write_asked(self, facts: AttemptFacts, first: RankExit, asked: Sequence[RankExit]) -> None:
        """Write down that ranks without a handler were asked to leave, and died of that."""
        for end in asked:
            name = signal_name(-(end.exit_code or 0))
            self._journal.emit(
                Event.PREEMPT_NOTICE, attempt=facts.attempt, source=name, kind=Asker.SIGNAL.value, rank=end.rank
            )
        self._write_preemption(attrs.evolve(facts, asked=[end.rank for end in asked]), first)

    def _was_asked_in_vain(self, facts: AttemptFacts, first: RankExit, *, raised: bool) -> bool:
        """Tell whether the first rank to end was ended because the job was to leave, and no stop was agreed.

        A rank without our handlers dies of the signal itself, before anybody has noticed it. torchrun sends SIGKILL
        to who does not leave; before the time is over that may be anything, such as the kernel short of memory. And a
        launcher also ends its ranks because another node's have failed, which the monitor there reports.
        """
        if raised or first.exit_code not in (*_TEARDOWN_SIGNALS, -signal.SIGKILL, None):
            return False
        notices = facts.told_of(Event.PREEMPT_NOTICE)
        if first.exit_code not in _TEARDOWN_SIGNALS:
            died_at = unix_s(first.at_ns)
            notices = [e for e in notices if e["t"] <= died_at and died_at > _end_of(e) - _KILLED_EARLY_S]
        explained = self._store.of_attempt(facts.attempt, facts.began_at, "crash", "hang")
        return bool(notices) and not any(map(_ended_it, explained))

    def _story(self, facts: AttemptFacts) -> Account:
        """Return what is known of a stop of this attempt: who asked, what came of it, who hindered it."""
        saved = saved_step(self._config)
        made = [event.get("step") for event in facts.told_of(Event.CKPT_COMMIT)]
        story = account(
            facts.events,
            facts.pages,
            node=self._node,
            saved=saved,
            saved_here=saved is not None and saved in made,
            died={},
            cut=find_cut(facts),
        )
        return attrs.evolve(story, stood=self._stood.get(facts.attempt))

    def _write_preemption(self, facts: AttemptFacts, first: RankExit) -> None:
        self._left.add(facts.attempt)
        story = self._story(facts)
        if not story.is_settled:
            at = min(unix_s(first.at_ns), story.askers.at or math.inf)
            by = story.askers.asked[0] if story.askers.asked else _end_words(first)
            self._stood_still(facts, at, by)
            story = self._story(facts)
        codes = {end.rank: end.exit_code for end in facts.exits}
        incident = story.incident(facts.attempt, time.time(), codes)
        written = record(self._store, self._journal, "preemption", incident, facts)
        console.say(f"on {self._node}: {story.reason()}")
        self._say_report(written)

    def _write_crash(self, facts: AttemptFacts, death: FirstDeath, stood: Incident | None) -> None:
        latency_s = (time.monotonic_ns() - facts.exits[0].at_ns) / 1e9
        incident = crash_incident(facts, death, time.time(), latency_s)
        if stood is not None:
            told_first = (Evidence(STALL, standing_words(stood)), *incident.evidence)
            incident = attrs.evolve(incident, action=stood.action, evidence=told_first)
        asked = self._story(facts).askers.asked
        if asked and death.classification.cause == "unknown":
            told = (
                f"{asked[0]} at about that time: was the job asked to leave? A rank without check() ends by the signal"
            )
            incident = attrs.evolve(incident, evidence=(*incident.evidence, Evidence("notice", told)))
        written = record(self._store, self._journal, "crash", incident, facts)
        console.say(f"CRASH: {one_line(written)}")
        self._say_report(written)

    def _say_report(self, incident: Incident) -> None:
        if incident.id is not None:
            console.say(f"  report: {self._config.run_dir}/incidents/{incident.id}/report.md")

    def _write_outcome(self, ranks: Sequence[WatchedRank]) -> None:
        """Write what the foreign launcher's exit code hides."""
        began = self._began_at()
        attempt = max(watched.snapshot.attempt for watched in ranks)
        final = [watched for watched in ranks if watched.snapshot.attempt == attempt]
        story = self._story(self._facts(attempt, final))
        incidents = [known for known in self._store.all() if known.id and (known.detected_at or 0.0) >= began]
        # What stood still is told already.
        kinds = ("crash",) if attempt in self._stood else ("crash", "hang")
        faults = [one_line(known) for known in incidents if known.kind in kinds and known.attempt == attempt]
        hung = self._hung.get(attempt, HangEnd())
        verdict, reason = verdict_of(
            final, story, left=attempt in self._left, fault=faults[-1] if faults else None, final_words=hung.final
        )
        unsaved = next((one for one in map(_request, final) if one is not None and one.action == UNSAVED), None)
        if unsaved is not None and verdict in (JobVerdict.FINISHED, JobVerdict.GIVE_UP):
            verdict, reason = JobVerdict.GIVE_UP, unsaved.reason
        if verdict is JobVerdict.FINISHED or story.is_agreed:
            close_warnings(self._store, self._journal, since=began)
        write_outcome(
            Path(self._config.run_dir) / "outcome.json",
            Outcome(
                verdict=verdict,
                exit_code=verdict.exit_code,
                reason=reason,
                job=self._config.job,
                run_dir=self._config.run_dir,
                node=self._node,
                started_at=began,
                ended_at=time.time(),
                attempts=attempt + 1,
                incidents=tuple(str(known.id) for known in incidents),
                checkpoint=saved_step(self._config),
                resume=None if verdict is JobVerdict.FINISHED else self._resume,
                stood=self._stood.get(attempt),
                free=hung.free and verdict is JobVerdict.GIVE_UP,
                advice=None if unsaved is None or verdict is not JobVerdict.GIVE_UP else unsaved.advice or None,
            ),
        )

    def _began_at(self) -> float:
        """Return when the first attempt of this job began; each attempt may have had a monitor and a key of its own."""
        starts = {
            event["rank"]: float(event["t"])
            for event in read_journal(Path(self._config.run_dir) / "journal", without=CURVES).events
            if event["event"] == Event.RANK_START and event["attempt"] == 0
        }
        return min(starts.values(), default=self._started_at)


def _ended_it(incident: Incident) -> bool:
    """Tell whether an incident is why the ranks of its attempt ended: a hang that is only reported ends nobody."""
    return incident.kind != "hang" or incident.action != "none"


def _end_words(first: RankExit) -> str:
    return f"rank {first.rank} {describe_exit(first.exit_code)}"


def _end_of(notice: Mapping[str, Any]) -> float:
    """Return when the time is over that a notice has left (Unix seconds); never, where it does not say."""
    left_s = notice.get("time_left_s")
    return notice["t"] + left_s if isinstance(left_s, (int, float)) else math.inf


def _request(watched: WatchedRank) -> EndingRequest | None:
    """Return what a rank wants done when its attempt is over."""
    try:
        return from_text(EndingRequest, read_text(f"{watched.stem}{ENDING_SUFFIX}", errors="replace"))
    except OSError:
        return None


def _stacks(watched: WatchedRank) -> str:
    try:
        return read_text(f"{watched.stem}.stack", errors="replace")
    except OSError:
        return ""
