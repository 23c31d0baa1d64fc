"""What follows when a hang is confirmed: one report of it, and the end of the ranks that are stuck."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from resilience_sdk import console
from resilience_sdk.events import Event
from resilience_sdk.hang import CulpritFinding, Judgement, RankState, find_culprits, standing
from resilience_sdk.incidents import Incident, IncidentStore, event_fields
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.escalate import end_ranks
from resilience_sdk.monitor.foreign import DeathWatch
from resilience_sdk.monitor.hang_report import SILENT_NODE, hang_incident, hang_lines, headline
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.merge import succession
from resilience_sdk.monitor.nodes import Nodes
from resilience_sdk.monitor.raised import blame_exceptions
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.scene import CloseLook
from resilience_sdk.monitor.summary import Verdict
from resilience_sdk.rank_page import snapshot_to_json
from resilience_sdk.settings import settings_from_json

_CUT_OFF_S = 3.0  # how much longer a node that is cut off leaves the report to the others
_TURN_S = 1.0  # how long the node whose turn it is to report a hang may take before the next one does
_TERM_GRACE_S = 1.0  # a hung rank that handles SIGTERM gets this long; its peers only wait for it


class HangResponse:
    """Reports hangs of one job from one node, or follows the report of another. The monitor's thread only."""

    def __init__(
        self,
        pages: Path,
        config: JobConfig,
        journal: Journal,
        in_charge: Callable[[], bool],
        *,
        store: IncidentStore,
        nodes: Nodes,
        learner: Learner,
        deaths: DeathWatch | None,
    ) -> None:
        """Write incidents into `store` and verdicts into `pages`; `deaths` is told which deaths are explained."""
        self._pages = pages
        self._config = config
        self._settings = settings_from_json(config.settings)
        self._journal = journal
        self._in_charge = in_charge
        self._store = store
        self._nodes = nodes
        self._learner = learner
        self._deaths = deaths
        self.begin(None)

    def begin(self, attempt: int | None) -> None:
        """Begin an attempt: nothing has been reported in it."""
        self._attempt = attempt
        self._confirmed_at: float | None = None
        self._reported: object = None
        self._followed: Verdict | None = None
        self._announced: Verdict | None = None  # comes back, passed on by the others
        self._older = {incident.id for incident in self._hangs()} if self._nodes.several else set()

    def relax(self) -> None:
        """Note that no hang is confirmed at this moment."""
        self._confirmed_at = None

    def is_reported(self, judgement: Judgement, states: Sequence[RankState]) -> bool:
        """Tell whether this is the hang that was reported already: a hang that lasts is one incident."""
        if judgement.kind != "confirmed" or self._reported is None:
            return False
        return standing(judgement, states, judgement.waited_for) == self._reported

    def act(
        self, judgement: Judgement, ranks: Sequence[WatchedRank], states: Sequence[RankState], look: CloseLook
    ) -> None:
        """Report a confirmed hang, if it is this node's turn, and end the stuck ranks where that is wished."""
        if not self._in_charge():
            return
        frames, flight = self._nodes.evidence(states, look)
        finding = find_culprits(states, frames, flight, on_cuda=_on_cuda())
        finding = blame_exceptions(finding, ranks)
        if self._followed is not None and set(self._followed.culprits) == set(finding.culprits):
            self._reported = standing(judgement, states, judgement.waited_for)
            return
        if not self._is_our_turn(finding, ranks):
            return
        self._journal.emit(
            Event.CONFIRMED,
            waited_for=list(judgement.waited_for),
            culprits=list(finding.culprits),
            detail=judgement.detail,
        )
        self._reported = standing(judgement, states, judgement.waited_for)
        incident = self._write_incident(judgement, finding, states, frames, look)
        if not finding.conclusive or _is_unnamed(judgement, states):
            for name in {suspect.name for suspect in judgement.suspects}:
                self._learner.book.double(name)
        self._learner.save()
        for line in hang_lines(incident, self._config.on_hang, self._config.run_dir):
            console.say(line)
        verdict = Verdict(incident.id, finding.culprits, incident.cause, headline(incident))
        if self._config.on_hang != "report":
            self._write_verdict(verdict)
        self._announced = verdict
        self._nodes.announce(verdict, _own(states), look)
        if self._config.on_hang != "report":
            self._end(verdict, ranks)

    def _is_our_turn(self, finding: CulpritFinding, ranks: Sequence[WatchedRank]) -> bool:
        """Tell whether this node reports the hang: at once if it is the culprit's, else when that is silent.

        Before that the other nodes are given a moment to answer: alone, no node can tell culprits from victims.
        """
        if self._confirmed_at is None:
            self._confirmed_at = time.monotonic()
        if not self._nodes.all_heard() and time.monotonic() - self._confirmed_at < _TURN_S:
            return False
        order = succession(finding.culprits, self._nodes.ranks_of([watched.rank for watched in ranks]))
        turn_s = order.index(self._nodes.me) * _TURN_S
        if self._nodes.is_cut_off():
            turn_s += _CUT_OFF_S + self._nodes.me * _TURN_S / 2
        return time.monotonic() - self._confirmed_at >= turn_s

    def follow_others(self, ranks: Sequence[WatchedRank], states: Sequence[RankState]) -> bool:
        """Act on a hang that another node has reported: end our ranks too, so that all start again."""
        told = self._nodes.verdict()
        if told is None or told[1] in (self._followed, self._announced) or not self._in_charge():
            return False
        name, verdict = told
        self._followed = verdict
        self._journal.emit(Event.CONFIRMED, culprits=list(verdict.culprits), by=name, id=verdict.incident)
        if self._config.on_hang == "report":
            self._nodes.pass_on(verdict, states)
            return False
        self._write_verdict(verdict)
        self._nodes.pass_on(verdict, states)
        console.say(f"HANG, told by {name}: {verdict.headline}")
        self._end(verdict, ranks)
        return True

    def _write_incident(
        self,
        judgement: Judgement,
        finding: CulpritFinding,
        states: Sequence[RankState],
        frames: Mapping[int, Sequence[str]],
        look: CloseLook,
    ) -> Incident:
        now_ns = time.monotonic_ns()
        incident = hang_incident(
            judgement,
            finding,
            states,
            frames,
            (*look.facts, *self._nodes.facts(now_ns)),
            attempt=self._attempt,
            on_hang=self._config.on_hang,
            now_ns=now_ns,
            now=time.time(),
        )
        pages = {state.rank: snapshot_to_json(state.snapshot) for state in states if state.snapshot is not None}
        stacks = {rank: "\n".join(("innermost first:", *lines, "")) for rank, lines in frames.items()}
        texts = {**stacks, **look.texts}
        try:
            incident, is_ours = self._store.create_once("hang", incident, texts, pages, same=self._twin_of(incident))
        except OSError as error:
            is_ours = True
            console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
        if is_ours:
            self._journal.emit(Event.INCIDENT, **event_fields(incident))
        return incident

    def _twin_of(self, incident: Incident) -> Callable[[Incident], bool]:
        """Return what tells the same hang where another node has just written it, having been thought silent.

        Two nodes may see at one moment that a third is lost, and nodes that do not hear one another blame one
        another: the first to write is right for all.
        """
        named = {culprit.rank for culprit in incident.culprits}
        by_several = self._nodes.several and self._config.on_hang != "report"

        def is_twin(other: Incident) -> bool:
            same = {culprit.rank for culprit in other.culprits} == named
            apart = incident.cause == other.cause == SILENT_NODE
            return by_several and (same or apart) and other.attempt == incident.attempt and other.id not in self._older

        return is_twin

    def _hangs(self) -> list[Incident]:
        try:
            return [incident for incident in self._store.all() if incident.kind == "hang"]
        except OSError:
            return []

    def _end(self, verdict: Verdict, ranks: Sequence[WatchedRank]) -> None:
        """End the stuck ranks; our launcher, or a foreign one by its own policy, does the rest."""
        living = [watched.target for watched in ranks if watched.alive and watched.target is not None]
        guilty = [target for target in living if target.rank in verdict.culprits]
        escalation = end_ranks(
            guilty or living,
            term_grace_s=min(_TERM_GRACE_S, self._settings.term_grace),
            reason=f"hang, incident {verdict.incident}",
            journal=self._journal,
            in_charge=self._in_charge,
        )
        if escalation.survivors:
            console.say(f"cannot end {escalation.survivors}: they survive SIGKILL, which means the kernel holds them")
        if self._deaths is not None:
            self._deaths.explained(self._attempt)

    def _write_verdict(self, verdict: Verdict) -> None:
        facts = {
            "attempt": self._attempt,
            "kind": "hang",
            "incident": verdict.incident,
            "at_ns": time.monotonic_ns(),
        }
        temporary = self._pages / f".verdict.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(facts))
            temporary.replace(self._pages / f"verdict-{self._attempt}.json")
        except OSError as error:
            console.say_once("verdict", f"cannot tell the launcher about the hang: {error}")


def _own(states: Sequence[RankState]) -> list[RankState]:
    """Return the states of this node's ranks: only those of others carry a clock of their own."""
    return [state for state in states if state.now_ns is None]


def _is_unnamed(judgement: Judgement, states: Sequence[RankState]) -> bool:
    """Tell whether all that expired is time that nobody named.

    Rank 0 may export in it while the others wait, in every attempt anew: it must get through some time.
    """
    late = {suspect.rank for suspect in judgement.suspects}
    return all(not state.stack or state.stack[-1].kind == "pulse" for state in states if state.rank in late)


def _on_cuda() -> bool:
    """Tell whether this node has NVIDIA devices, where Python runs ahead of what the device does."""
    return os.path.exists("/proc/driver/nvidia/version")
