"""Writes down what an ended attempt means: incidents and what was found out about it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.attribution.corroboration import weigh
from resilience_sdk.attribution.exits import Classification, classification, describe_exit
from resilience_sdk.attribution.first_death import FirstDeath
from resilience_sdk.attribution.taxonomy import meaning
from resilience_sdk.console import say_once
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.events import Event
from resilience_sdk.incidents import Incident, IncidentStore, event_fields
from resilience_sdk.journal import Journal
from resilience_sdk.launcher import evidence, gone, node_ends
from resilience_sdk.launcher.attempt import time_to_leave
from resilience_sdk.launcher.decision import AttemptEnd, EndedBy
from resilience_sdk.launcher.evidence import Facts
from resilience_sdk.launcher.node_ends import NodeEnd, read_end
from resilience_sdk.launcher.peers import Peer
from resilience_sdk.launcher.relay import NodeRelay
from resilience_sdk.monitor.recovery import RecoveryWatch, close_warnings
from resilience_sdk.monitor.straggler_response import SOURCE as STRAGGLER
from resilience_sdk.preemption.account import Account, account, completed_steps, lost_words
from resilience_sdk.rank_page import snapshot_to_json
from resilience_sdk.run_directory import RunDirectory

_LEFT = "the job was asked to leave"
_ALL_LEFT_S = 10.0  # how long nodes wait for one another after a stop: the store may be with the first that is done
_TURN_S = 1.0  # how long each node leaves the report to the one before it, where they cannot speak
_RECORDED_S = 2.0  # how long for the first node's incident


def _own_end(facts: Facts, first: FirstDeath, headline: str, incident: str | None) -> NodeEnd:
    codes = {end.rank: end.exit_code for end in facts.exits}
    died = tuple(rank for rank in first.culprits if codes.get(rank))  # one that finished too early died of nothing
    return NodeEnd(facts.node_number, culprits=died, headline=headline, incident=incident)


def _told(name: Event, facts: Facts) -> list[Mapping[str, Any]]:
    """Return what the attempt's processes have journalled by that name."""
    return [event for event in facts.events() if event["event"] == name.value]


def _read(told: Mapping[int, Mapping[str, Any]], own: NodeEnd) -> dict[int, NodeEnd]:
    return {own.node: own, **{node: read_end(node, data) for node, data in told.items()}}


@attrs.frozen
class _Slow:
    """Why a job stopped itself."""

    straggler: str
    is_here: bool
    incident: str | None


@attrs.frozen
class Finding:
    """What an attempt's end came to: for the decision, for the screen, and the incident's id."""

    end: AttemptEnd
    headline: str
    incident: str | None = None
    traceback: str | None = None


class Reporter:
    """Turns the facts of an ended attempt into an incident and a finding. Never raises for a full disk."""

    def __init__(self, run_dir: RunDirectory, journal: Journal, relay: NodeRelay, *, term_grace_s: float) -> None:
        """Write into `run_dir`; events go to `journal`, and what other nodes need to know through `relay`."""
        self._store = IncidentStore(run_dir.path, explain=meaning)
        self._journal = journal
        self._relay = relay
        self._term_grace_s = term_grace_s

    def conclude(self, facts: Facts, verdict: Mapping[str, object] | None, first_ns: int | None) -> Finding:
        """Conclude an attempt; `verdict` is the monitor's, when a hang ended it."""
        self._note_recovery(facts)
        if facts.ended_by is EndedBy.HANG:
            incident_id = str((verdict or {}).get("incident") or "")
            self._relay.tell_end(NodeEnd(facts.node_number, incident=incident_id, hang=True).to_json())
            return self._after_hang(facts, incident_id)
        first = evidence.first_death(facts)
        end = evidence.attempt_end(facts, first)
        if facts.ended_by is EndedBy.INTERRUPT:
            pages = (trace.snapshot for trace in facts.traces.values() if trace.snapshot is not None)
            told = f"interrupted by the user; {lost_words(completed_steps(pages), end.checkpoint_after)}"
            return Finding(attrs.evolve(end, leaving=told), told)
        left = end.stop_agreed or EXIT_PREEMPTED in end.exit_codes.values()
        if facts.ended_by is EndedBy.PREEMPTION or (left and not first.culprits):
            slow = self._straggler(facts)
            if slow is not None:
                end = attrs.evolve(end, straggler=slow.straggler, straggler_is_here=slow.is_here)
                end = attrs.evolve(end, category="slow", cause="straggler_persistent")
                told = f"the job stopped itself for {slow.straggler.partition(': ')[0]}"  # the reason says the rest
                return Finding(end, told, self._after_stop(facts, end, first, slow))
            recorded = self._after_stop(facts, end, first)
            story = self._story(facts, end, first)  # only now all nodes have told theirs
            if story.is_agreed:
                close_warnings(self._store, self._journal)
            return Finding(attrs.evolve(end, leaving=story.reason()), story.reason(), recorded)
        if not any(end.exit_codes.values()):
            close_warnings(self._store, self._journal)
            return Finding(end, "all ranks exited with 0")
        now = time.time()
        latency = None if first_ns is None else max(0.0, (time.monotonic_ns() - first_ns) / 1e9)
        headline = evidence.headline(facts, first)
        own_fault = bool(first.culprits)
        other, away = self._told_by_other_nodes(facts, first, headline)
        if away:
            first, headline = gone.blame(first, away, self._lost_store(facts)), gone.headline(away)
            end = evidence.attempt_end(facts, first)
        if other is not None and other.hang:
            return self._after_hang(attrs.evolve(facts, ended_by=EndedBy.HANG), other.incident or "")
        if other is not None and other.joins:
            return Finding(attrs.evolve(end, ended_by=EndedBy.MEMBERSHIP), other.headline)
        if other is not None:
            return Finding(self._as_known(end, other.incident), other.headline or headline, other.incident)
        if self._relay.store_is_lost and not own_fault:
            # The others cannot be asked who reports, but all see the run directory: by turns, the first does.
            self._await_record("crash", facts, facts.node_number * _TURN_S)
            if known := self._recorded("crash", facts):
                return Finding(end, headline, known)
        numbers = self._bad_numbers(facts, end)
        if numbers is not None:
            headline, written = numbers.evidence[0].text if numbers.evidence else headline, numbers.id
            # Which rank raised first is chance; what the ranks agree on is the same in each attempt that ends alike.
            raised = end.error and attrs.evolve(end.error, message=headline)
            end = attrs.evolve(end, error=raised, category="numerics", cause=numbers.cause or end.cause)
        else:
            incident = evidence.crash_incident(facts, first, now, latency)
            written = self._write("crash", incident, facts)
        self._relay.tell_end(_own_end(facts, first, headline, written).to_json())
        return Finding(end, headline, written, evidence.first_traceback(facts, first))

    def _bad_numbers(self, facts: Facts, end: AttemptEnd) -> Incident | None:
        """Return the incident that the ranks have written of the bad numbers that they left over."""
        with contextlib.suppress(OSError):
            return self._store.bad_numbers(facts.attempt, facts.began_at, "" if end.error is None else end.error.type)
        return None

    def _as_known(self, end: AttemptEnd, incident_id: str | None) -> AttemptEnd:
        """Put the cause that another node has found in the place of our symptoms; what it does of it is its own."""
        with contextlib.suppress(KeyError, OSError):
            known = self._store.get(incident_id or "")
            if known.cause:
                category, confidence = known.category or end.category, known.confidence or 0.0
                return attrs.evolve(end, cause=known.cause, category=category, confidence=confidence)
        return end

    def _told_by_other_nodes(
        self, facts: Facts, first: FirstDeath, headline: str
    ) -> tuple[NodeEnd | None, tuple[Peer, ...]]:
        """Return the end that another node reports as the cause of ours, None where this node is to report.

        And the nodes that are gone, where that is the cause.
        """
        if not self._relay.active:
            return None, ()
        own = _own_end(facts, first, headline, None)
        if own.culprits:
            self._relay.note_fault()
        self._relay.tell_end(own.to_json())

        def decided(ends: Mapping[int, Mapping[str, Any]], faults: int, waited_s: float) -> bool:
            known = _read(ends, own)
            who = node_ends.reporter(known, facts.nodes)
            told = sum(1 for end in known.values() if end.order is not None)
            over = waited_s > node_ends.patience_s(faults, told, self._term_grace_s)
            spoken = who is not None and (known[who].incident is not None or known[who].joins)
            return over or who == own.node or spoken

        ends = _read(self._relay.wait_for_ends(decided, self._term_grace_s + node_ends.AFTER_FAULT_S), own)
        away: tuple[Peer, ...] = ()
        if len(ends) < facts.nodes and not any(end.culprits or end.hang or end.joins for end in ends.values()):
            ends, away = self._who_is_gone(facts, own)
        who = node_ends.reporter_at_last(ends)
        return (None if who is None or who == own.node else ends[who]), away

    def _who_is_gone(self, facts: Facts, own: NodeEnd) -> tuple[dict[int, NodeEnd], tuple[Peer, ...]]:
        """Wait until each node has told its end or is known to be gone; return the ends and who is gone."""

        def settled(ends: Mapping[int, Mapping[str, Any]], faults: int, waited_s: float) -> bool:
            told = _read(ends, own)
            real = any(end.culprits or end.hang or end.joins for end in told.values())
            return real or self._relay.store_is_lost or gone.all_settled(facts.nodes, told, self._relay.silent_s)

        ends = _read(self._relay.wait_for_ends(settled, gone.PATIENCE_S), own)
        if any(end.culprits or end.hang or end.joins for end in ends.values()):
            return ends, ()
        away = gone.gone_nodes(facts.peers, ends, self._relay.silent_s, self._lost_store(facts))
        who = min(ends)
        if away and who != own.node:  # its incident comes now
            ends = _read(
                self._relay.wait_for_ends(lambda e, *_: bool(e.get(who, {}).get("incident")), _RECORDED_S), own
            )
        return ends, away

    def _lost_store(self, facts: Facts) -> str | None:
        """Return the host of the store where it does not answer any more."""
        return facts.store_host if self._relay.store_is_lost else None

    def note_restart(self, incident_id: str) -> None:
        """Correct an incident that advised to stop: what may have been a coincidence is tried once more."""
        with contextlib.suppress(KeyError, OSError):
            if self._store.get(incident_id).action in ("stop", "none"):
                self._store.update(incident_id, action="restart")

    def _note_recovery(self, facts: Facts) -> None:
        """Close what this attempt recovered from, should it have been over before the monitor's next look."""
        with contextlib.suppress(OSError):
            if any(i.attempt is not None and i.attempt < facts.attempt for i in self._store.open_recoveries()):
                pages = [trace.snapshot for trace in facts.traces.values() if trace.snapshot is not None]
                RecoveryWatch(self._store, self._journal).look(facts.attempt, pages, sorted(facts.traces))

    def _after_hang(self, facts: Facts, incident_id: str) -> Finding:
        """Take over what the monitor found; the deaths are its doing."""
        found: Incident | None = None
        with contextlib.suppress(KeyError, OSError):
            found = self._store.get(incident_id)
        cause = found.cause if found is not None and found.cause else "unknown"
        seen = classification(cause, found.confidence or 0.0 if found is not None else 0.0)
        known = weigh(seen, facts.node_told)  # a GPU that is gone makes its ranks wait for ever
        # What the culprits raised counts where the monitor found it: later it may be our signals' doing.
        raised = found is not None and any(item.source == "exception" for item in found.evidence)
        culprits = tuple(culprit.rank for culprit in found.culprits) if found is not None and raised else ()
        end = evidence.attempt_end(facts, FirstDeath(culprits, (), known))
        if known.cause != cause:
            self._correct(incident_id, known)
        elif found is not None and found.action:
            end = attrs.evolve(end, action=found.action, category=found.category or "hang")
        who = ", ".join(f"rank {culprit.rank}" for culprit in found.culprits[:4]) if found else ""
        told = f"the job hung ({who or 'no rank can be named'}: {known.cause})"
        return Finding(end, told, incident_id or None)

    def _correct(self, incident_id: str, known: Classification) -> None:
        """Put a cause that is surer than the monitor's into its incident; what it had found stays beside it."""
        with contextlib.suppress(KeyError, OSError):
            self._store.update(
                incident_id,
                category=known.category,
                cause=known.cause,
                action=known.action,
                confidence=known.confidence,
                evidence=(*known.evidence, *self._store.get(incident_id).evidence),
            )

    def _straggler(self, facts: Facts) -> _Slow | None:
        """Return who was so slow that the job stopped itself; None where it was asked to leave by others, too."""
        notices = _told(Event.PREEMPT_NOTICE, facts)
        if facts.ended_by is EndedBy.PREEMPTION or not notices:
            return None
        if any(notice.get("source") != STRAGGLER for notice in notices):
            return None
        node, incident = notices[0].get("node"), notices[0].get("incident")
        cure = f"; leave out node {node}" if isinstance(node, str) and node else ""
        is_here = not cure or node == facts.node
        return _Slow(f"{notices[0].get('reason')}{cure}", is_here, incident if isinstance(incident, str) else None)

    def _after_stop(self, facts: Facts, end: AttemptEnd, first: FirstDeath, slow: _Slow | None = None) -> str | None:
        """Record that the job left, once for all nodes, when all of them have; `slow` has its incident already."""
        if self._relay.active:
            own = facts.node_number
            self._relay.tell_end(NodeEnd(own, headline=_LEFT).to_json())
            wait_s = time_to_leave(_ALL_LEFT_S)
            self._relay.wait_for_ends(lambda ends, faults, waited: len({own, *ends}) >= facts.nodes, wait_s)
            if own and slow is None:
                self._await_record("preemption", facts, min(wait_s, _RECORDED_S))
        if slow is not None and slow.incident is not None:
            return slow.incident
        return self._recorded("preemption", facts) or self._preemption(facts, end, self._story(facts, end, first))

    def _await_record(self, kind: str, facts: Facts, wait_s: float) -> None:
        self._relay.wait_for_ends(lambda *_: self._recorded(kind, facts) is not None, wait_s)

    def _recorded(self, kind: str, facts: Facts) -> str | None:
        """Return the incident of that kind of this attempt, should the ranks or another node have recorded it."""
        with contextlib.suppress(OSError):
            for known in self._store.of_attempt(facts.attempt, facts.began_at, kind):
                return known.id
        return None

    def _story(self, facts: Facts, end: AttemptEnd, first: FirstDeath) -> Account:
        """Return who asked the job to leave, what came of it, and who hindered that."""
        return account(
            facts.events(),
            {rank: trace.snapshot for rank, trace in facts.traces.items() if trace.snapshot is not None},
            node=facts.node,
            saved=end.checkpoint_after,
            saved_here=end.made_checkpoint,
            died={one.rank: describe_exit(one.exit_code) for one in facts.exits if one.rank in first.culprits},
        )

    def _preemption(self, facts: Facts, end: AttemptEnd, story: Account) -> str | None:
        """Record that the job left."""
        exits = {e["rank"]: e["exit_code"] for e in _told(Event.RANK_EXIT, facts) if e.get("exit_code") is not None}
        return self._write("preemption", story.incident(facts.attempt, time.time(), {**exits, **end.exit_codes}), facts)

    def _write(self, kind: str, incident: Incident, facts: Facts) -> str | None:
        pages = {r: snapshot_to_json(t.snapshot) for r, t in facts.traces.items() if t.snapshot is not None}
        stacks = {r: t.stacks for r, t in facts.traces.items() if t.stacks}
        for rank, trace in facts.traces.items():
            frames = (trace.exception or {}).get("frames")
            if isinstance(frames, list):
                raised = "\n".join(["raised at, innermost first:", *map(str, frames)])
                stacks[rank] = f"{raised}\n\n{stacks.get(rank, '')}".rstrip() + "\n"
        try:
            written = self._store.create(kind, incident, stacks, pages)
        except OSError as error:
            say_once("incident", f"the incident cannot be written: {error}")
            self._journal.emit(Event.DEGRADED, what="incident", why=str(error))
            return None
        self._journal.emit(Event.INCIDENT, **event_fields(written))
        return written.id
