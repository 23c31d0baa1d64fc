"""Deaths under a launcher that is not ours: the monitor alone can tell who went first."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import console
from resilience_sdk.attribution.first_death import Death, FirstDeath, find_first_death
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.events import Event
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore, event_fields
from resilience_sdk.incidents.report import one_line
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal, read_journal
from resilience_sdk.monitor.exits import exit_code, is_clean, signal_name
from resilience_sdk.monitor.foreign_outcome import resume_command, saved_step, verdict_of
from resilience_sdk.monitor.raised import read_exception
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.recovery import close_warnings
from resilience_sdk.outcome import Outcome, Verdict, write_outcome
from resilience_sdk.preemption.account import Account, account
from resilience_sdk.rank_page import snapshot_to_json

_WAIT_FOR_PEERS_S = 1.0  # deaths within this time belong together
_TEARDOWN_SIGNALS = (-15, -2, -1)
_KILLED_EARLY_S = 2.0  # the grace of who kills may have begun before ours


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
        self._noted: set[Path] = set()
        self._started_at = time.time()
        self._resume = resume_command(config)

    def note(self, died: Sequence[WatchedRank]) -> None:
        """Journal each death as it is seen."""
        for watched in died:
            self._noted.add(watched.stem)
            code = exit_code(watched)
            self._journal.emit(
                Event.RANK_EXIT,
                rank=watched.rank,
                pid=watched.snapshot.pid,
                exit_code=code if code is not None and code >= 0 else None,
                signal=signal_name(-code) if code is not None and code < 0 else None,
                exit_state=watched.snapshot.exit_state,
                step=watched.snapshot.step,
                step_is_global=watched.snapshot.step_is_global,
            )

    def explained(self, attempt: int | None) -> None:
        """Note that the deaths of an attempt are the end of a hang that was reported."""
        if attempt is not None:
            self._done.add(attempt)

    def conclude(self, ranks: Sequence[WatchedRank], *, everything: bool = False) -> None:
        """Write the incident of an attempt in which a rank died of its own, when its peers had time to follow."""
        dead = [watched for watched in ranks if not watched.alive]
        if dead and any(not is_clean(watched) for watched in dead):
            first_ns = min(watched.died_ns or 0 for watched in dead if not is_clean(watched))
            complete = len(dead) == len(ranks) or time.monotonic_ns() - first_ns > _WAIT_FOR_PEERS_S * 1e9
            attempt = ranks[0].snapshot.attempt
            if (complete or everything) and attempt not in self._done:
                self._done.add(attempt)
                self._explain(attempt, dead, ranks)
        if everything and ranks:
            self._write_outcome(ranks)

    def _explain(self, attempt: int, dead: Sequence[WatchedRank], ranks: Sequence[WatchedRank]) -> None:
        """Write the incident of an attempt in which a rank did not end well: it failed, or left as it was asked."""
        deaths = [_death(watched) for watched in dead]
        unclean = [death for death, watched in zip(deaths, dead, strict=True) if not is_clean(watched)]
        first = min(unclean, key=lambda death: (death.t_ns, death.exit_code != EXIT_PREEMPTED))
        # From the first of them on, the foreign launcher ends the others: their deaths by its signal say nothing.
        leaves = first.exit_code == EXIT_PREEMPTED
        verdict = find_first_death(deaths, ending_ns=first.t_ns if leaves else first.t_ns + 1)
        if (leaves and not verdict.culprits) or self._was_asked_in_vain(attempt, first):
            self._write_preemption(attempt, deaths, ranks)
        elif first.exit_code not in _TEARDOWN_SIGNALS:  # else the launcher, the scheduler or a person ended the job
            culprits = verdict.culprits or ((first.rank,) if first.exception is None else ())
            raised = [
                str(death.exception.get("type")) for death in deaths if death.exception and death.rank in culprits
            ]
            if raised and self._store.bad_numbers(attempt, self._began_at(), raised[0]):
                return  # the ranks have told of it
            self._write_crash(attempt, verdict, culprits, ranks)

    def _was_asked_in_vain(self, attempt: int, first: Death) -> bool:
        """Tell whether the first rank to end was ended because the job was to leave, and no stop was agreed.

        A rank without our handlers dies of the signal itself, before anybody has noticed it. torchrun sends SIGKILL
        to who does not leave; before the time is over that may be anything, such as the kernel short of memory. And a
        launcher also ends its ranks because another node's have failed, which the monitor there reports.
        """
        if first.exception is not None or first.exit_code not in (*_TEARDOWN_SIGNALS, -signal.SIGKILL, None):
            return False
        notices = [event for event in self._told(attempt) if event["event"] == Event.PREEMPT_NOTICE.value]
        if first.exit_code not in _TEARDOWN_SIGNALS:
            died_at = time.time() - (time.monotonic_ns() - first.t_ns) / 1e9
            notices = [e for e in notices if e["t"] <= died_at and died_at > _end_of(e) - _KILLED_EARLY_S]
        began = self._began_at()
        return bool(notices) and not self._store.of_attempt(attempt, began, "crash", "hang")

    def _story(self, attempt: int, ranks: Sequence[WatchedRank]) -> Account:
        """Return what is known of a stop of this attempt: who asked, what came of it, who hindered it."""
        told, saved = self._told(attempt), saved_step(self._config)
        made = [e.get("step") for e in told if e["event"] == Event.CKPT_COMMIT.value]
        return account(
            told,
            {watched.rank: watched.snapshot for watched in ranks},
            node=self._node,
            saved=saved,
            saved_here=saved is not None and saved in made,
            died={},
        )

    def _write_preemption(self, attempt: int, deaths: Sequence[Death], ranks: Sequence[WatchedRank]) -> None:
        self._left.add(attempt)
        story = self._story(attempt, ranks)
        codes = {death.rank: death.exit_code for death in deaths}
        incident = self._write("preemption", story.incident(attempt, time.time(), codes), ranks)
        console.say(f"on {self._node}: {story.reason()}")
        self._say_report(incident)

    def _write_crash(
        self, attempt: int, verdict: FirstDeath, culprits: tuple[int, ...], ranks: Sequence[WatchedRank]
    ) -> None:
        incident = self._incident(attempt, verdict, culprits, ranks)
        asked = self._story(attempt, ranks).askers.asked
        if asked and verdict.classification.cause == "unknown":
            told = (
                f"{asked[0]} at about that time: was the job asked to leave? A rank without check() ends by the signal"
            )
            incident = attrs.evolve(incident, evidence=(*incident.evidence, Evidence("notice", told)))
        incident = self._write("crash", incident, ranks)
        console.say(f"CRASH: {one_line(incident)}")
        self._say_report(incident)

    def _write(self, kind: str, incident: Incident, ranks: Sequence[WatchedRank]) -> Incident:
        pages = {watched.rank: snapshot_to_json(watched.snapshot) for watched in ranks}
        stacks = {watched.rank: text for watched in ranks if (text := _stacks(watched))}
        try:
            incident = self._store.create(kind, incident, stacks, pages)
        except OSError as error:
            console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
            incident = attrs.evolve(incident, kind=kind)
        self._journal.emit(Event.INCIDENT, **event_fields(incident))
        return incident

    def _say_report(self, incident: Incident) -> None:
        if incident.id is not None:
            console.say(f"  report: {self._config.run_dir}/incidents/{incident.id}/report.md")

    def _incident(
        self, attempt: int, verdict: FirstDeath, culprits: tuple[int, ...], ranks: Sequence[WatchedRank]
    ) -> Incident:
        by_rank = {watched.rank: watched for watched in ranks}
        first_ns = min(w.died_ns or 0 for w in ranks if not w.alive)
        return Incident(
            attempt=attempt,
            detected_at=time.time(),
            detection_latency_s=(time.monotonic_ns() - first_ns) / 1e9,
            culprits=tuple(_culprit(by_rank[rank], self._node) for rank in culprits if rank in by_rank),
            victims=tuple(sorted(by_rank.keys() - set(culprits))),
            category=verdict.classification.category,
            cause=verdict.classification.cause,
            action=verdict.classification.action,
            confidence=verdict.classification.confidence,
            evidence=verdict.classification.evidence,
        )

    def _write_outcome(self, ranks: Sequence[WatchedRank]) -> None:
        """Write what the foreign launcher's exit code hides."""
        began = self._began_at()
        attempt = max(watched.snapshot.attempt for watched in ranks)
        final = [watched for watched in ranks if watched.snapshot.attempt == attempt]
        story = self._story(attempt, final)
        incidents = [known for known in self._store.all() if known.id and (known.detected_at or 0.0) >= began]
        faults = [
            one_line(known) for known in incidents if known.kind in ("crash", "hang") and known.attempt == attempt
        ]
        verdict, code, reason = verdict_of(
            final, story, left=attempt in self._left, fault=faults[-1] if faults else None
        )
        if verdict is Verdict.FINISHED or story.is_agreed:
            close_warnings(self._store, self._journal)
        write_outcome(
            Path(self._config.run_dir) / "outcome.json",
            Outcome(
                verdict=verdict,
                exit_code=code,
                reason=reason,
                job=self._config.job,
                run_dir=self._config.run_dir,
                node=self._node,
                started_at=began,
                ended_at=time.time(),
                attempts=attempt + 1,
                incidents=tuple(str(known.id) for known in incidents),
                checkpoint=saved_step(self._config),
                resume=None if verdict is Verdict.FINISHED else self._resume,
            ),
        )

    def _told(self, attempt: int) -> list[Mapping[str, Any]]:
        """Return what this job has journalled of an attempt; one before it has numbered its own alike."""
        began = self._began_at()
        events = read_journal(Path(self._config.run_dir) / "journal").events
        return [event for event in events if event.get("attempt") == attempt and event["t"] >= began]

    def _began_at(self) -> float:
        """Return when the first attempt of this job began; each attempt may have had a monitor and a key of its own."""
        starts = {
            event["rank"]: float(event["t"])
            for event in read_journal(Path(self._config.run_dir) / "journal").events
            if event["event"] == Event.RANK_START and event["attempt"] == 0
        }
        return min(starts.values(), default=self._started_at)


def _end_of(notice: Mapping[str, Any]) -> float:
    """Return when the time is over that a notice has left (Unix seconds); never, where it does not say."""
    left_s = notice.get("time_left_s")
    return notice["t"] + left_s if isinstance(left_s, (int, float)) else math.inf


def _death(watched: WatchedRank) -> Death:
    code = exit_code(watched)
    if code is None and watched.snapshot.exit_state == "clean":
        code = 0
    exception = read_exception(watched.stem, code)
    return Death(rank=watched.rank, exit_code=code, exception=exception, t_ns=watched.died_ns or 0)


def _stacks(watched: WatchedRank) -> str:
    try:
        return Path(f"{watched.stem}.stack").read_text(errors="replace")
    except OSError:
        return ""


def _culprit(watched: WatchedRank, node: str) -> Culprit:
    stack = watched.snapshot.main_lane.stack
    frames = (read_exception(watched.stem, exit_code(watched)) or {}).get("frames") or ()
    return Culprit(
        rank=watched.rank,
        node=node,
        step=watched.snapshot.step,
        section=stack[-1].name if stack else None,
        stack=tuple(str(frame) for frame in frames),
        step_is_global=watched.snapshot.step_is_global,
    )
