"""The response to a confirmed hang.

One report of it, and the end of the ranks that are stuck, which always finishes.

Signals go through pidfds only, so never to a process that got the number of a dead rank. Each is journalled,
and before each the caller is asked whether this monitor is still the one in charge.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.cluster import leader
from resilience_sdk.core import console, nvrx_words
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.settings import settings_from_json
from resilience_sdk.hang.culprit import CulpritFinding, find_culprits
from resilience_sdk.hang.detect import Judgement
from resilience_sdk.hang.timers import RankState
from resilience_sdk.incidents import Evidence, Incident, IncidentStore, event_fields
from resilience_sdk.monitor.evidence import CloseLook
from resilience_sdk.monitor.hang_report import SILENT_NODE, hang_incident, hang_lines, headline
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.node_summary import HangVerdict
from resilience_sdk.monitor.nodes import Nodes
from resilience_sdk.monitor.pending_exceptions import blame_exceptions
from resilience_sdk.monitor.ranks import Target, WatchedRank
from resilience_sdk.recorder.page_reader import snapshot_to_json
from resilience_sdk.system.procfs import has_signal, status_fields

if TYPE_CHECKING:
    from resilience_sdk.monitor.main import MonitorLock
    from resilience_sdk.monitor.other_launchers import DeathWatch

_NS_PER_S = 1_000_000_000
_KILL_GRACE_S = 5.0


@attrs.frozen
class Escalation:
    """How it ended: ranks that are gone, ranks still there, and whether another monitor took over."""

    ended: tuple[int, ...]
    survivors: tuple[int, ...]
    broken_off: bool


def end_ranks(
    targets: Sequence[Target],
    *,
    term_grace_s: float,
    reason: str,
    journal: Journal,
    in_charge: Callable[[], bool],
    kill_grace_s: float = _KILL_GRACE_S,
) -> Escalation:
    """End the ranks in the given order and return what became of them; takes at most both graces.

    Args:
        targets: The ranks to end, those to be signalled first (the culprits) in front.
        term_grace_s: How long they may take after SIGTERM, all together (`Settings.term_grace`).
        reason: Journalled beside every signal.
        journal: Gets a `signal_sent` event per signal.
        in_charge: Asked before every signal; once it says no, nothing more is sent.
        kill_grace_s: How long to look on after SIGKILL. A rank in uninterruptible sleep survives it.
    """
    waiting = list(targets)
    for number, grace_s in ((signal.SIGTERM, term_grace_s), (signal.SIGKILL, kill_grace_s)):
        for target in waiting:
            if not target.alive:
                continue
            if not in_charge():
                return _outcome(targets, broken_off=True)
            _send(target, number, reason, journal)
        waiting = _wait(waiting, grace_s, in_charge)
        if not waiting:
            break
    return _outcome(targets, broken_off=False)


def _send(target: Target, number: signal.Signals, reason: str, journal: Journal) -> None:
    """Send one signal. A stopped process is then continued, because it would not see SIGTERM before.

    In this order: the pending SIGTERM is the first thing that a continued process meets, not its own code. One that
    handles SIGTERM would take it for a scheduler's notice and go on, so it is killed as it stands.
    """
    status = status_fields(target.pid)
    numbers: list[signal.Signals] = [number]
    if number == signal.SIGTERM and status.get("State", "")[:1] in ("T", "t"):
        handles = has_signal(status.get("SigCgt"), signal.SIGTERM) or has_signal(status.get("SigIgn"), signal.SIGTERM)
        numbers = [signal.SIGKILL] if handles else [signal.SIGTERM, signal.SIGCONT]
    for each in numbers:
        error = None
        try:
            if not target.send(each):
                return
        except OSError as failure:
            error = failure.strerror
        journal.emit(
            Event.SIGNAL_SENT,
            rank=target.rank,
            pid=target.pid,
            signal=each.name,
            reason=reason,
            error=error,
        )


def _wait(targets: Sequence[Target], grace_s: float, in_charge: Callable[[], bool]) -> list[Target]:
    """Return the targets that are still there after the grace, or as soon as none is.

    Returns early, too, when another monitor has taken over; the caller notices before its next signal.
    """
    end_ns = time.monotonic_ns() + int(grace_s * _NS_PER_S)
    remaining = [target for target in targets if target.alive]
    poller = select.poll()
    for target in remaining:
        if target.pidfd >= 0:
            poller.register(target.pidfd, select.POLLIN)
    longest_ms = 250.0 if all(target.pidfd >= 0 for target in remaining) else 20.0
    while remaining and in_charge():
        left_ms = (end_ns - time.monotonic_ns()) / 1_000_000
        if left_ms <= 0:
            break
        for pidfd, _ in poller.poll(min(left_ms, longest_ms)):
            poller.unregister(pidfd)
        remaining = [target for target in remaining if target.alive]
    return remaining


def _outcome(targets: Sequence[Target], *, broken_off: bool) -> Escalation:
    survivors = tuple(target.rank for target in targets if target.alive)
    ended = tuple(target.rank for target in targets if target.rank not in survivors)
    return Escalation(ended, survivors, broken_off)


# How much longer a node that is cut off leaves the report to the others: nodes tell every two seconds, so they may see
# the same silence end two seconds apart, and a busy machine takes its time.
_CUT_OFF_S = 6.0
_TURN_S = 1.0  # how long the node whose turn it is to report a hang may take before the next one does
_TERM_GRACE_S = 1.0  # a hung rank that handles SIGTERM gets this long; its peers only wait for it


class HangResponse:
    """Reports hangs of one job from one node, or follows the report of another. The monitor's thread only."""

    def __init__(
        self,
        pages: Path,
        config: JobConfig,
        journal: Journal,
        lock: MonitorLock,
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
        self._lock = lock
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
        self._followed: HangVerdict | None = None
        self._announced: HangVerdict | None = None  # comes back, passed on by the others
        self._older = {incident.id for incident in self._hangs()} if self._nodes.several else set()

    def relax(self) -> None:
        """Note that no hang is confirmed at this moment."""
        self._confirmed_at = None

    def is_reported(self, judgement: Judgement, states: Sequence[RankState]) -> bool:
        """Tell whether this is the hang that was reported already: a hang that lasts is one incident."""
        if judgement.kind != "confirmed" or self._reported is None:
            return False
        return _position(judgement, states) == self._reported

    def act(
        self,
        judgement: Judgement,
        ranks: Sequence[WatchedRank],
        states: Sequence[RankState],
        look: CloseLook,
        storage: Mapping[int, str],
    ) -> bool:
        """Report a confirmed hang, if it is this node's turn, and end the stuck ranks where that is wished.

        `storage`: by rank that stands in a save, into what it saves, and whether that place answers. Tell whether it is
        reported now, by this node or by another.
        """
        if not self._lock.in_charge():
            return False
        frames, flight = self._nodes.evidence(states, look)
        finding = find_culprits(states, frames, flight, on_cuda=_on_cuda())
        finding = blame_exceptions(finding, ranks)
        if self._followed is not None and set(self._followed.culprits) == set(finding.culprits):
            self._reported = _position(judgement, states)
            return True
        if not self._is_our_turn(finding, ranks):
            return False
        self._journal.emit(
            Event.CONFIRMED,
            waited_for=list(judgement.waited_for),
            culprits=list(finding.culprits),
            detail=judgement.detail,
        )
        self._reported = _position(judgement, states)
        told = [Evidence("storage", f"rank {rank} saves into {words}") for rank, words in sorted(storage.items())]
        incident = self._write_incident(judgement, finding, states, frames, (*told, *look.facts), look.texts)
        if not finding.conclusive or _is_unnamed(judgement, states):
            for name in {suspect.name for suspect in judgement.suspects}:
                self._learner.book.double(name)
        for line in hang_lines(incident, self._config.on_hang, self._config.run_dir):
            console.say(line)
        self._say_as_nvrx(incident, finding.culprits or judgement.waited_for, ranks)
        places, free, final = self._count_ending(judgement, finding, states)
        verdict = HangVerdict(incident.id, finding.culprits, incident.cause, headline(incident), free, final, places)
        if self._config.on_hang != "report":
            self._write_verdict(verdict)
        self._announced = verdict
        self._nodes.announce(verdict, _own(states), look)
        if self._config.on_hang != "report":
            self._end(verdict, ranks)
        return True

    def _say_as_nvrx(self, incident: Incident, stuck: Sequence[int], ranks: Sequence[WatchedRank]) -> None:
        """Say the lines of NVRx beside ours, where the program is written for it."""
        for watched in ranks:
            page = watched.snapshot
            if page.nvrx_words and watched.rank in stuck:
                words = nvrx_words.no_heartbeat(
                    incident.detection_latency_s or 0.0, is_first=page.first_beat_ns is None
                )
                console.say(f"  rank {watched.rank}: {words}")

    def _count_ending(
        self, judgement: Judgement, finding: CulpritFinding, states: Sequence[RankState]
    ) -> tuple[tuple[str, ...], bool, str | None]:
        """Remember that the job ends here.

        Return the places that count, whether it costs no restart, and why it was the last, if so. A deadline that
        somebody set is his, and nothing is learned from it.
        """
        due = judgement.due
        if self._config.on_hang == "report" or due is None or due.is_set:
            return (), False, None
        blamed = finding.culprits or judgement.waited_for
        named = [state for state in states if state.rank in blamed and state.place]
        # Only who was not surely stopped may have been ended wrongly: other endings teach nothing about the place.
        counts = bool(finding.culprits) and finding.cause != "hang_rank_stopped"
        places = tuple({(state.place if counts else f"{finding.cause}: {state.place}"): None for state in named})
        free = self._note_ending(places)
        final = None
        if due.final and finding.cause == "hang_rank_stuck" and named:
            state = named[0]
            times = state.endings + 1
            final = (
                f"rank {state.rank} stood still {times} times at the same place ({state.place}): somebody has to look"
            )
        return places, free, final

    def _note_ending(self, places: Sequence[str]) -> bool:
        """Count an ending at each of these places; tell whether it is the first at all of them, and costs nothing."""
        free = all([self._learner.places.end(place) for place in places]) and bool(places)
        self._learner.save()
        return free

    def _is_our_turn(self, finding: CulpritFinding, ranks: Sequence[WatchedRank]) -> bool:
        """Tell whether this node reports the hang: at once if it is the culprit's, else when that is silent.

        Before that the other nodes are given a moment to answer: alone, no node can tell culprits from victims.
        """
        if self._confirmed_at is None:
            self._confirmed_at = time.monotonic()
        if not self._nodes.all_heard() and time.monotonic() - self._confirmed_at < _TURN_S:
            return False
        order = leader.by_culprit(finding.culprits, self._nodes.ranks_of([watched.rank for watched in ranks]))
        wait_s = leader.patience_s(order, self._nodes.me, _TURN_S)
        if self._nodes.is_cut_off():
            wait_s += _CUT_OFF_S + self._nodes.me * _TURN_S / 2
        return time.monotonic() - self._confirmed_at >= wait_s

    def follow_others(self, ranks: Sequence[WatchedRank], states: Sequence[RankState]) -> bool:
        """Act on a hang that another node has reported: end our ranks too, so that all start again."""
        told = self._nodes.verdict()
        if told is None or told[1] in (self._followed, self._announced) or not self._lock.in_charge():
            return False
        name, verdict = told
        self._followed = verdict
        self._journal.emit(Event.CONFIRMED, culprits=list(verdict.culprits), by=name, id=verdict.incident)
        if self._config.on_hang == "report":
            self._nodes.pass_on(verdict, states)
            return False
        self._note_ending(verdict.places)
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
        facts: Iterable[Evidence],
        dumps: Mapping[int, str],
    ) -> Incident:
        now_ns = time.monotonic_ns()
        incident = hang_incident(
            judgement,
            finding,
            states,
            frames,
            (*facts, *self._nodes.facts(now_ns)),
            attempt=self._attempt,
            on_hang=self._config.on_hang,
            now_ns=now_ns,
            now=time.time(),
        )
        pages = {state.rank: snapshot_to_json(state.snapshot) for state in states if state.snapshot is not None}
        stacks = {rank: "\n".join(("innermost first:", *lines, "")) for rank, lines in frames.items()}
        texts = {**stacks, **dumps}
        try:
            incident, is_ours = self._store.create_once("hang", incident, texts, pages, same=self._twin_of(incident))
        except OSError as error:
            is_ours = True
            console.say_once("incident", f"the incident cannot be written into {self._store.path} now: {error}")
            self._store.keep("hang", incident, texts, pages, written=self._tell)
        if is_ours:
            self._journal.emit(Event.INCIDENT, **event_fields(incident))
        return incident

    def _tell(self, incident: Incident) -> None:
        self._journal.emit(Event.INCIDENT, **event_fields(incident))

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

    def _end(self, verdict: HangVerdict, ranks: Sequence[WatchedRank]) -> None:
        """End the stuck ranks; our launcher, or a foreign one by its own policy, does the rest."""
        living = [watched.target for watched in ranks if watched.alive and watched.target is not None]
        guilty = [target for target in living if target.rank in verdict.culprits]
        for watched in ranks:
            if watched.snapshot.nvrx_words and watched.target in (guilty or living):
                console.say(nvrx_words.closing(watched.snapshot.pid, "SIGTERM"))
        escalation = end_ranks(
            guilty or living,
            term_grace_s=min(_TERM_GRACE_S, self._settings.term_grace),
            reason=f"hang, incident {verdict.incident}",
            journal=self._journal,
            in_charge=self._lock.in_charge,
        )
        if escalation.survivors:
            console.say(f"cannot end {escalation.survivors}: they survive SIGKILL, which means the kernel holds them")
        if self._deaths is not None:
            self._deaths.explained(self._attempt, free=verdict.free, final=verdict.final)

    def _write_verdict(self, verdict: HangVerdict) -> None:
        facts = {
            "attempt": self._attempt,
            "kind": "hang",
            "incident": verdict.incident,
            "at_ns": time.monotonic_ns(),
            "free": verdict.free,
            "final": verdict.final,
        }
        try:
            write_whole(self._pages / f"verdict-{self._attempt}.json", json.dumps(facts))
        except OSError as error:
            console.say_once("verdict", f"cannot tell the launcher about the hang: {error}")


def _position(judgement: Judgement, states: Sequence[RankState]) -> object:
    """Return what stays the same while a hang lasts, whatever else becomes late in the meantime: nobody has come on."""
    pages = {state.rank: state.snapshot for state in states if state.rank in judgement.waited_for}
    return tuple((rank, (p.pid, p.beats, p.done) if p is not None else None) for rank, p in sorted(pages.items()))


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
