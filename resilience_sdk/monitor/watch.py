"""The monitor's round: read the pages, learn, judge, and act on what is confirmed."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import console, hostinfo
from resilience_sdk.events import Event
from resilience_sdk.hang import (
    Confirmation,
    CulpritFinding,
    Judgement,
    RankState,
    Suspect,
    find_culprits,
    judge,
    standing,
)
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.escalate import end_ranks
from resilience_sdk.monitor.evidence import collect_evidence
from resilience_sdk.monitor.foreign import DeathWatch
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.ranks import RankTable, WatchedRank, remove_files
from resilience_sdk.monitor.recovery import RecoveryWatch
from resilience_sdk.monitor.scene import CloseLook, states_of
from resilience_sdk.rank_page import RankSnapshot, snapshot_to_json
from resilience_sdk.settings import settings_from_json

_AGREE_S = 0.02  # between the two looks that must agree on a hang
_LOOK_AGAIN_S = 5.0  # between two collections of evidence about ranks that stay where they are
_TERM_GRACE_S = 1.0  # a hung rank that handles SIGTERM gets this long; its peers only wait for it
_SIGNAL_EXPECTED_S = 30.0


class Watcher:
    """Watches the ranks of one job on one node. Runs in the monitor's only thread."""

    def __init__(self, pages: Path, config: JobConfig, journal: Journal, in_charge: Callable[[], bool]) -> None:
        """Watch `pages`; `in_charge()` tells whether no other monitor has taken over."""
        self._pages = pages
        self._config = config
        self._settings = settings_from_json(config.settings)
        self._journal = journal
        self._in_charge = in_charge
        self._store = IncidentStore(config.run_dir)
        self._node = hostinfo.host_name()
        self.table = RankTable(pages)
        self.learner = Learner(Path(config.run_dir) / "timeouts.json", self._settings, config.script)
        self._recovery = RecoveryWatch(self._store, journal)
        self._deaths = DeathWatch(config, self._store, journal, self._node) if config.foreign else None
        self._attempt: int | None = None
        self._confirmation = Confirmation()
        self._look: CloseLook | None = None
        self._looked_at = float("-inf")
        self._suspected: object = None
        self._reported: object = None
        self._quiet_said = False

    def round(self, timeout_s: float) -> float:
        """Wait for deaths up to `timeout_s`, look once, and return how long to wait before the next look."""
        died = self.table.wait(timeout_s)
        self.table.scan()
        for why in self.table.take_refused():
            self._journal.emit(Event.DEGRADED, what="page refused", why=why)
        ranks = self._current_ranks()
        now_ns = time.monotonic_ns()
        for watched in ranks:
            if watched.alive:
                watched.refresh()
            self.learner.look(watched, now_ns)
        if self._deaths is not None:
            self._deaths.note(died)
            self._deaths.conclude([w for w in self.table.all() if w.snapshot.attempt == self._attempt])
        self._recovery.look(self._attempt, ranks, self._expected_ranks())
        self._say_if_blind(ranks)
        self.learner.save_now_and_then()
        return min(self._settings.monitor_interval, self._judge(ranks, now_ns))

    def note_failure(self, error: Exception) -> None:
        """Journal a round that failed; the next one begins anew."""
        self._journal.emit(Event.DEGRADED, what="round", why="".join(traceback.format_exception(error)))

    def is_over(self) -> bool:
        """Tell whether nobody is left to watch."""
        return not any(watched.alive for watched in self.table.all())

    def finish(self) -> None:
        """Keep what was learned and clean up, when all ranks are gone."""
        self.learner.save()
        if self._deaths is not None:
            self._deaths.conclude(self.table.all(), everything=True)
            for watched in self.table.all():
                remove_files(watched.stem)

    # -- ranks and attempts

    def _current_ranks(self) -> list[WatchedRank]:
        ranks = self.table.all()
        if not ranks:
            return []
        attempt = max(watched.snapshot.attempt for watched in ranks)
        current = [watched for watched in ranks if watched.snapshot.attempt == attempt]
        if attempt != self._attempt:
            self._attempt = self._journal.attempt = attempt
            self.learner.begin_attempt(current[0].snapshot.world_size, len(current))
            self._look = self._suspected = self._reported = None
            self._quiet_said = False
        return current

    def _expected_ranks(self) -> list[int] | None:
        """Return the ranks of this attempt on this node, where our launcher announced them."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [int(rank) for rank in self._announcement()["ranks"]]
        return None

    def _announcement(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((self._pages / f"attempt-{self._attempt}.json").read_text())
        return found

    def _is_ending(self) -> bool:
        """Tell whether the launcher has announced that it ends the ranks."""
        return (self._pages / f"ending-{self._attempt}.json").exists()

    def _say_if_blind(self, ranks: list[WatchedRank]) -> None:
        """Say once per attempt that there is no progress signal, so that no hang can be told."""
        now_ns = time.monotonic_ns()
        blind = [
            watched.rank
            for watched in ranks
            if watched.alive
            and not watched.snapshot.declared
            and not watched.snapshot.beats
            and not watched.snapshot.done
            and now_ns - watched.snapshot.created_ns > _SIGNAL_EXPECTED_S * 1e9
        ]
        if blind and not self._quiet_said:
            self._quiet_said = True
            self._journal.emit(Event.DEGRADED, what="no progress signal", ranks=blind)
            if 0 in blind:
                console.say(
                    "no progress signal so far (no heartbeat, optimizer step or collective): deaths are handled, "
                    "but a hang cannot be told until there is one"
                )

    # -- judging

    def _judge(self, ranks: list[WatchedRank], now_ns: int) -> float:
        """Judge the attempt, act on a confirmed hang, and return the seconds until the next look."""
        if not ranks or self._is_ending():
            return self._settings.monitor_interval
        book, cap = self.learner.book, self._settings.hang_cap
        states = states_of(ranks, self._node, closely=False, look=None, now_ns=now_ns)
        judgement = judge(states, book, now_ns, cap)
        if judgement.kind == "quiet":
            self._suspected = None
            if judgement.half_way and self._half_way_matters(judgement, ranks):
                self._look_closely(ranks)
            return self._until(judgement.next_look_ns)
        self._note_suspects(judgement, states)
        states, judgement = self._judge_closely(ranks, now_ns)
        if judgement.kind != "confirmed" and self._may_look_again(ranks):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns)
        if self._is_reported(judgement, states):
            return self._settings.monitor_interval
        if judgement.kind == "confirmed" and (self._look is None or not self._look.covers(ranks)):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns)
        if judgement.kind != "confirmed":
            self._confirmation.agrees(judgement, states)
            return self._until(judgement.next_look_ns)
        if self._is_reported(judgement, states):
            return self._settings.monitor_interval
        if not self._confirmation.agrees(judgement, states):
            return _AGREE_S
        self._act(judgement, ranks, states)
        return self._settings.monitor_interval

    def _judge_closely(self, ranks: list[WatchedRank], now_ns: int) -> tuple[list[RankState], Judgement]:
        states = states_of(ranks, self._node, closely=True, look=self._look, now_ns=now_ns)
        return states, judge(states, self.learner.book, now_ns, self._settings.hang_cap)

    def _until(self, next_look_ns: int | None) -> float:
        if next_look_ns is None:
            return self._settings.monitor_interval
        return max(0.001, (next_look_ns - time.monotonic_ns()) / 1e9)

    def _half_way_matters(self, judgement: Judgement, ranks: list[WatchedRank]) -> bool:
        """Tell whether evidence should be taken early: a process group's own timeout may come before ours."""
        return bool(judgement.half_way) and self._may_look_again(ranks)

    def _may_look_again(self, ranks: list[WatchedRank]) -> bool:
        if self._look is None or not self._look.covers(ranks):
            return time.monotonic() - self._looked_at > 0.2
        return time.monotonic() - self._looked_at > _LOOK_AGAIN_S

    def _look_closely(self, ranks: list[WatchedRank]) -> None:
        """Take stacks and flight records of all living ranks; bounded by `dump_grace`."""
        earlier = self._look.cpu if self._look is not None else None
        found = collect_evidence(
            [watched.target for watched in ranks if watched.target is not None and watched.alive],
            dump_signal=self._settings.dump_signal,
            grace_s=self._settings.dump_grace,
            earlier=earlier,
            journal=self._journal,
            may_ask=self._in_charge,
        )
        for watched in ranks:
            if watched.alive:
                watched.refresh()
        self._look = CloseLook.of(ranks, found)
        self._looked_at = time.monotonic()

    def _note_suspects(self, judgement: Judgement, states: list[RankState]) -> None:
        late = [suspect.rank for suspect in judgement.suspects]
        suspected = tuple((s.rank, s.name) for s in judgement.suspects), standing(judgement, states, late)
        if suspected != self._suspected:
            self._suspected = suspected
            self._journal.emit(
                Event.SUSPECT,
                suspects=[attrs.asdict(suspect) for suspect in judgement.suspects],
                detail=judgement.detail,
            )

    def _is_reported(self, judgement: Judgement, states: list[RankState]) -> bool:
        """Tell whether this is the hang that was reported already: a hang that lasts is one incident."""
        if judgement.kind != "confirmed" or self._reported is None:
            return False
        return standing(judgement, states, judgement.waited_for) == self._reported

    # -- acting

    def _act(self, judgement: Judgement, ranks: list[WatchedRank], states: list[RankState]) -> None:
        if not self._in_charge():
            return
        look = self._look
        assert look is not None
        finding = find_culprits(states, look.frames, look.flight, on_cuda=_on_cuda())
        self._journal.emit(
            Event.CONFIRMED,
            waited_for=list(judgement.waited_for),
            culprits=list(finding.culprits),
            detail=judgement.detail,
        )
        self._reported = standing(judgement, states, judgement.waited_for)
        incident = self._write_incident(judgement, finding, ranks, look)
        if not finding.conclusive:
            for name in {suspect.name for suspect in judgement.suspects}:
                self.learner.book.double(name)
        self.learner.save()
        for line in hang_lines(incident, self._config):
            console.say(line)
        if self._config.on_hang != "report":
            self._end(incident, finding, ranks)

    def _write_incident(
        self, judgement: Judgement, finding: CulpritFinding, ranks: list[WatchedRank], look: CloseLook
    ) -> Incident:
        by_rank = {watched.rank: watched for watched in ranks}
        now_ns, now = time.monotonic_ns(), time.time()
        late = {suspect.rank: suspect for suspect in judgement.suspects}
        still = [
            _stuck_for(by_rank[r].snapshot, late.get(r), now_ns)
            for r in finding.culprits or judgement.waited_for
            if r in by_rank
        ]
        incident = Incident(
            attempt=self._attempt,
            detected_at=now,
            detection_latency_s=max(still, default=None),
            culprits=tuple(self._culprit(rank, by_rank, look) for rank in finding.culprits),
            victims=finding.victims,
            category=finding.category,
            cause=finding.cause,
            action="restart" if self._config.on_hang != "report" else "none",
            confidence=finding.confidence,
            evidence=(
                *finding.evidence,
                *(_suspect_evidence(suspect) for suspect in judgement.suspects),
                *look.facts,
            ),
        )
        pages = {rank: snapshot_to_json(watched.snapshot) for rank, watched in by_rank.items()}
        try:
            incident = self._store.create("hang", incident, look.texts, pages)
        except OSError as error:
            console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
        self._journal.emit(
            Event.INCIDENT, id=incident.id, kind="hang", culprits=list(finding.culprits), cause=finding.cause
        )
        return incident

    def _culprit(self, rank: int, by_rank: Mapping[int, WatchedRank], look: CloseLook) -> Culprit:
        watched = by_rank.get(rank)
        if watched is None:
            return Culprit(rank=rank, node=None, step=None, section=None, stack=())
        stack = watched.snapshot.main_lane.stack
        return Culprit(
            rank=rank,
            node=self._node,
            step=watched.snapshot.step,
            section=stack[-1].name if stack else None,
            stack=look.frames.get(rank, ()),
        )

    def _end(self, incident: Incident, finding: CulpritFinding, ranks: list[WatchedRank]) -> None:
        """End the stuck ranks; our launcher, or a foreign one by its own policy, does the rest."""
        self._write_verdict(incident)
        living = [watched.target for watched in ranks if watched.alive and watched.target is not None]
        guilty = [target for target in living if target.rank in finding.culprits]
        escalation = end_ranks(
            guilty or living,
            term_grace_s=min(_TERM_GRACE_S, self._settings.term_grace),
            reason=f"hang, incident {incident.id}",
            journal=self._journal,
            in_charge=self._in_charge,
        )
        if escalation.survivors:
            console.say(f"cannot end {escalation.survivors}: they survive SIGKILL, which means the kernel holds them")
        if self._deaths is not None:
            self._deaths.explained(self._attempt)

    def _write_verdict(self, incident: Incident) -> None:
        verdict = {
            "attempt": self._attempt,
            "kind": "hang",
            "incident": incident.id,
            "at_ns": time.monotonic_ns(),
        }
        temporary = self._pages / f".verdict.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(verdict))
            temporary.replace(self._pages / f"verdict-{self._attempt}.json")
        except OSError as error:
            console.say_once("verdict", f"cannot tell the launcher about the hang: {error}")


def hang_lines(incident: Incident, config: JobConfig) -> list[str]:
    """Return what a person is told when a hang is confirmed: who, where, why, and what happens next."""
    if incident.culprits:
        lines = []
        for culprit in incident.culprits:
            where = f" in section '{culprit.section}'" if culprit.section else " outside of any section"
            step = f" at step {culprit.step}" if culprit.step is not None else ""
            lines.append(f"HANG: rank {culprit.rank} on {culprit.node} stands still{step}{where} ({incident.cause})")
            lines += [f"  at {frame}" for frame in culprit.stack[:3]]
    else:
        lines = [f"HANG: no single rank is to blame ({incident.category}: {incident.cause})"]
    if incident.victims:
        lines.append(f"  waiting for it: {len(incident.victims)} rank(s), {_some(incident.victims)}")
    lines += [f"  why: {evidence.text}" for evidence in incident.evidence[:2]]
    if incident.id is not None:
        lines.append(f"  report: {config.run_dir}/incidents/{incident.id}/report.md")
    lines.append(
        {
            "restart": "  next: the ranks are restarted",
            "kill": "  next: the stuck ranks are ended, so that the launcher's restart policy acts",
            "report": "  next: nothing is done to it; --on-hang restart under `resilience run`, or "
            "RESILIENCE_ON_HANG=kill, would end it",
        }[config.on_hang]
    )
    return lines


def _stuck_for(snapshot: RankSnapshot, suspect: Suspect | None, now_ns: int) -> float:
    """Return for how many seconds a rank has been stuck, as far as its page tells.

    One that moved after its deadline (in inner sections, say) is not standing still: it counts from the
    entry into what it does not come out of.
    """
    idle_s = (now_ns - max(snapshot.created_ns, snapshot.main_lane.last_ns)) / 1e9
    if suspect is not None and suspect.deadline_s is not None and idle_s < suspect.elapsed_s - suspect.deadline_s:
        return suspect.elapsed_s
    return idle_s


def _suspect_evidence(suspect: Suspect) -> Evidence:
    limit = "no deadline" if suspect.deadline_s is None else f"deadline {suspect.deadline_s:.2f} s"
    return Evidence("deadline", f"rank {suspect.rank}: {suspect.name} for {suspect.elapsed_s:.2f} s ({limit})")


def _some(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")


def _on_cuda() -> bool:
    """Tell whether this node has NVIDIA devices, where Python runs ahead of what the device does."""
    return os.path.exists("/proc/driver/nvidia/version")
