"""The report of an ended attempt: incidents and what was found out about it, by one node for all.

A rank's death shows on other nodes as lost connections. Each launcher tells the others what it saw: the node
where a rank died of its own reports, all others leave it at that. The order in which faults were seen comes from
a counter in the store, because clocks of two hosts are not compared.

The ranks that are left only see lost connections. Their launchers know more: which nodes were there, which of them
have told how it ended, and which have given no sign of life since.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.attribution.exits import Classification, classification, describe_exit
from resilience_sdk.attribution.first_death import FirstDeath, weigh
from resilience_sdk.attribution.taxonomy import meaning
from resilience_sdk.cluster import leader
from resilience_sdk.cluster.bus import NodeRelay
from resilience_sdk.cluster.membership import Peer
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.hang.culprit import MISMATCH
from resilience_sdk.incidents import STALL, Evidence, Incident, IncidentStore, standing_words
from resilience_sdk.postmortem import crash
from resilience_sdk.postmortem.collect import (
    AFTER_FAULT_S,
    PATIENCE_S,
    NodeEnd,
    all_settled,
    blame,
    gone_nodes,
    headline_of_lost,
    patience_s,
    read_end,
    reporter,
    reporter_at_last,
)
from resilience_sdk.postmortem.cut_saves import find_cut
from resilience_sdk.postmortem.facts import AttemptEnd, AttemptFacts, EndedBy, unix_s
from resilience_sdk.postmortem.outcome import FROM_OUTSIDE, record, record_standing, standing_hang
from resilience_sdk.postmortem.preemption import Account, account, completed_steps, lost_words
from resilience_sdk.postmortem.recovery import RecoveryWatch, close_warnings
from resilience_sdk.preemption.context import time_to_leave
from resilience_sdk.preemption.reasons import Asker

_LEFT = "the job was asked to leave"
_ALL_LEFT_S = 10.0  # how long nodes wait for one another after a stop: the store may be with the first that is done
_TURN_S = 1.0  # how long each node leaves the report to the one before it, where they cannot speak
_RECORDED_S = 2.0  # how long for the first node's incident


def _own_end(facts: AttemptFacts, first: FirstDeath, headline: str, incident: str | None) -> NodeEnd:
    codes = {end.rank: end.exit_code for end in facts.exits}
    died = tuple(rank for rank in first.culprits if codes.get(rank))  # one that finished too early died of nothing
    lost = facts.lost_server is not None
    return NodeEnd(facts.node_number, culprits=died, headline=headline, incident=incident, fault=lost, free=lost)


def _read(told: Mapping[int, Mapping[str, Any]], own: NodeEnd) -> dict[int, NodeEnd]:
    return {own.node: own, **{node: read_end(node, data) for node, data in told.items()}}


def _began_to_end(facts: AttemptFacts) -> float:
    """Return when the end of the attempt began (Unix seconds)."""
    return time.time() if facts.ending_ns is None else unix_s(facts.ending_ns)


def _of_hang(end: AttemptEnd, hang: Incident) -> AttemptEnd:
    """Return the end of an attempt that stood still before anybody ended it: that is what is decided on."""
    return attrs.evolve(
        end,
        category=hang.category or end.category,
        cause=hang.cause or end.cause,
        action=hang.action or end.action,
        confidence=hang.confidence or 0.0,
        lines=crash.users_lines(hang.culprits) or end.lines,
    )


def _corrected(hang: Incident, facts: AttemptFacts) -> Incident:
    """Return what stood still with the cause that the kernel tells, where that is surer."""
    known = weigh(classification(hang.cause or "unknown", hang.confidence or 0.0), facts.node_told)
    if known.cause == hang.cause:
        return hang
    return attrs.evolve(
        hang,
        category=known.category,
        cause=known.cause,
        action=known.action,
        confidence=known.confidence,
        evidence=(*hang.evidence[:1], *known.evidence, *hang.evidence[1:]),
    )


@attrs.frozen
class AttemptFinding:
    """What an attempt's end came to: for the decision, for the screen, and the incident's id."""

    end: AttemptEnd
    headline: str
    incident: str | None = None
    traceback: str | None = None
    before: str | None = None
    """The incident of what stood still before that, where it has one of its own."""


@attrs.frozen
class _Ended:
    """One ended attempt as the endings see it."""

    facts: AttemptFacts
    verdict: Mapping[str, object]
    """The monitor's, where a hang ended it."""
    first_ns: int | None
    """When the first rank was seen to fail, by the monotonic clock."""
    first: FirstDeath
    end: AttemptEnd
    aborted: str | None
    """The incident of ranks that were aborted after they were done."""

    @property
    def left(self) -> bool:
        """Whether the ranks left because they were asked to."""
        left = self.end.stop_agreed or EXIT_PREEMPTED in self.end.exit_codes.values()
        return self.facts.ended_by is EndedBy.PREEMPTION or (left and not self.first.culprits)


class Reporter:
    """Turns the facts of an ended attempt into an incident and a finding. Never raises for a full disk."""

    def __init__(self, run_dir: RunDirectory, journal: Journal, relay: NodeRelay, *, term_grace_s: float) -> None:
        """Write into `run_dir`; events go to `journal`, and what other nodes need to know through `relay`."""
        self._store = IncidentStore(run_dir.path, explain=meaning)
        self._journal = journal
        self._relay = relay
        self._term_grace_s = term_grace_s

    def write_kept(self) -> None:
        """Write what a full disk did not take, where it does now; never raises."""
        self._store.write_kept()

    def conclude(
        self, facts: AttemptFacts, verdict: Mapping[str, object] | None, first_ns: int | None
    ) -> AttemptFinding:
        """Conclude an attempt; `verdict` is the monitor's, when a hang ended it.

        The endings are tried in this order, the first that fits tells what it was.
        """
        self._note_recovery(facts)
        first = crash.first_death(facts)
        ended = _Ended(
            facts, verdict or {}, first_ns, first, crash.attempt_end(facts, first), self._note_aborted(facts)
        )
        endings = (
            self._hung,
            self._interrupted,
            self._stopped_itself,
            self._asked_to_leave,
            self._finished,
            self._known_elsewhere,
            self._numbers_went_bad,
        )
        for ending in endings:
            if (finding := ending(ended)) is not None:
                return finding
        return self._crashed(ended)

    # -- the endings

    def _hung(self, ended: _Ended) -> AttemptFinding | None:
        if ended.facts.ended_by is not EndedBy.HANG:
            return None
        told = read_end(ended.facts.node_number, {**ended.verdict, "hang": True})
        self._relay.tell_end(told.to_json())
        return self._after_hang(ended.facts, told)

    def _interrupted(self, ended: _Ended) -> AttemptFinding | None:
        facts, end = ended.facts, ended.end
        if facts.ended_by is not EndedBy.INTERRUPT:
            return None
        by = "interrupted by the user" + (", whose terminal was closed (SIGHUP)" if facts.terminal_closed else "")
        told = f"{by}; {lost_words(completed_steps(facts.pages.values()), end.checkpoint_after)}"
        hang = self._standing(facts, by)
        if hang is not None:
            told = f"{standing_words(hang)}; then {told}"
            end = _of_hang(end, hang)
        return AttemptFinding(attrs.evolve(end, leaving=told), told, hang.id if hang is not None else None)

    def _stopped_itself(self, ended: _Ended) -> AttemptFinding | None:
        """Conclude an attempt that left for a straggler, which may have its incident already; nobody else asked."""
        facts = ended.facts
        notices = facts.told_of(Event.PREEMPT_NOTICE)
        if not ended.left or facts.ended_by is EndedBy.PREEMPTION or not notices:
            return None
        if any(notice.get("kind") != Asker.STRAGGLER.value for notice in notices):
            return None
        node, incident = notices[0].get("node"), notices[0].get("incident")
        cure = f"; leave out node {node}" if isinstance(node, str) and node else ""
        end = attrs.evolve(
            ended.end,
            straggler=f"{notices[0].get('reason')}{cure}",
            straggler_is_here=not cure or node == facts.node,
            category="slow",
            cause="straggler_persistent",
        )
        self._tell_stop(facts, None, wait_for_record=False)
        if not isinstance(incident, str):
            story = self._story(facts, end, ended.first)
            incident = self._recorded("preemption", facts) or self._preemption(facts, end, story)
        who = str(end.straggler).partition(": ")[0]  # the reason says the rest
        return AttemptFinding(end, f"the job stopped itself for {who}", incident)

    def _asked_to_leave(self, ended: _Ended) -> AttemptFinding | None:
        """Conclude an attempt that was asked to leave: what stood still then comes first, and decides."""
        if not ended.left:
            return None
        facts, end, first = ended.facts, ended.end, ended.first
        story = self._story(facts, end, first)
        by = story.askers.asked[0] if story.askers.asked else _LEFT
        at = min(_began_to_end(facts), story.askers.at or math.inf)
        stood = None if story.is_settled else self._find_standing(facts, at)
        others = self._tell_stop(facts, None if stood is None else standing_words(stood))
        hang = None if stood is None else self._standing(facts, by, at)
        story = self._story(facts, end, first)  # only now all nodes have told theirs
        words = others if hang is None else standing_words(hang)
        if words is not None and not story.is_settled:
            story = attrs.evolve(story, stood=words)
            end = attrs.evolve(end if hang is None else _of_hang(end, hang), stood=words)
        recorded = self._recorded("preemption", facts) or self._preemption(facts, end, story)
        if story.is_agreed:
            close_warnings(self._store, self._journal, since=facts.began_at)
        before = hang.id if hang is not None else None
        return AttemptFinding(attrs.evolve(end, leaving=story.reason()), story.reason(), recorded, before=before)

    def _finished(self, ended: _Ended) -> AttemptFinding | None:
        if any(ended.end.exit_codes.values()):
            return None
        close_warnings(self._store, self._journal, since=ended.facts.began_at)
        return AttemptFinding(ended.end, "all ranks exited with 0", ended.aborted)

    def _known_elsewhere(self, ended: _Ended) -> AttemptFinding | None:
        """Take over what another node reports, where the cause is there; or name the nodes that are gone."""
        facts, first, end = ended.facts, ended.first, ended.end
        headline = crash.headline(facts, first)
        other, away = self._told_by_other_nodes(facts, first, headline)
        if away:
            first, headline = blame(first, away, self._lost_store(facts)), headline_of_lost(away)
            end = crash.attempt_end(facts, first)
        if other is None:
            if self._relay.store_is_lost and not ended.first.culprits and facts.lost_server is None:
                # The others cannot be asked who reports, but all see the run directory: by turns, the first does.
                place = facts.node_number
                self._await_record("crash", facts, leader.patience_s(range(place + 1), place, _TURN_S))
                if known := self._recorded("crash", facts):
                    return AttemptFinding(end, headline, known)
            return self._crashed(attrs.evolve(ended, first=first, end=end), headline) if away else None
        if other.hang:
            return self._after_hang(attrs.evolve(facts, ended_by=EndedBy.HANG), other)
        if other.joins:
            return AttemptFinding(attrs.evolve(end, ended_by=EndedBy.MEMBERSHIP), other.headline)
        if other.fault and other.free:
            end = attrs.evolve(end, ended_by=EndedBy.SERVER, free=True)
        return AttemptFinding(self._as_known(end, other.incident), other.headline or headline, other.incident)

    def _numbers_went_bad(self, ended: _Ended) -> AttemptFinding | None:
        """Take over the incident that the ranks have written of the bad numbers that they left over."""
        facts, end = ended.facts, ended.end
        numbers: Incident | None = None
        with contextlib.suppress(OSError):
            raised = "" if end.error is None else end.error.type
            numbers = self._store.bad_numbers(facts.attempt, facts.began_at, raised)
        if numbers is None:
            return None
        headline = numbers.evidence[0].text if numbers.evidence else crash.headline(facts, ended.first)
        # Which rank raised first is chance; what the ranks agree on is the same in each attempt that ends alike.
        error = end.error and attrs.evolve(end.error, message=headline)
        end = attrs.evolve(end, error=error, category="numerics", cause=numbers.cause or end.cause)
        return self._tell_crash(attrs.evolve(ended, end=end), headline, numbers.id)

    def _crashed(self, ended: _Ended, headline: str = "") -> AttemptFinding:
        """Record the crash, and what stood still before it where that may be somebody's doing."""
        facts, first, end = ended.facts, ended.first, ended.end
        headline = headline or crash.headline(facts, first)
        now, before = time.time(), None
        latency = None if ended.first_ns is None else max(0.0, (time.monotonic_ns() - ended.first_ns) / 1e9)
        incident = crash.crash_incident(facts, first, now, latency)
        died_at = None if latency is None else now - latency
        if not first.culprits or end.cause in FROM_OUTSIDE or self._library_gave_up(ended, died_at):
            # Who only lost its peers, or gave up on them, had waited for somebody.
            only_waited = not first.culprits and first.classification.category == "network"
            hang = self._standing(facts, headline, died_at, late_counts=only_waited)
            if hang is not None:
                words, before = standing_words(hang), hang.id
                first_told = (Evidence(STALL, words), *incident.evidence)
                incident = attrs.evolve(incident, action=hang.action, evidence=first_told)
                # Proven, or the only one who is named: the time-out of the library followed from it.
                if hang.cause == MISMATCH or (only_waited and hang.culprits):
                    incident = attrs.evolve(
                        incident, category=hang.category, cause=hang.cause, confidence=hang.confidence
                    )
                end, headline = attrs.evolve(_of_hang(end, hang), stood=words), f"{words}; then {headline}"
        written = record(self._store, self._journal, "crash", incident, facts).id
        return self._tell_crash(attrs.evolve(ended, end=end), headline, written, before)

    def _library_gave_up(self, ended: _Ended, at: float | None) -> bool:
        """Tell whether ranks aborted that were proven to wait for one another in vain: what they died of is that."""
        if ended.end.cause != "rank_abort":
            return False
        stood = self._find_standing(ended.facts, _began_to_end(ended.facts) if at is None else at)
        return stood is not None and stood.cause == MISMATCH

    def _tell_crash(
        self, ended: _Ended, headline: str, incident: str | None, before: str | None = None
    ) -> AttemptFinding:
        self._relay.tell_end(_own_end(ended.facts, ended.first, headline, incident).to_json())
        traceback = crash.first_traceback(ended.facts, ended.first)
        return AttemptFinding(ended.end, headline, incident, traceback, before)

    # -- hangs, and what stood still

    def _after_hang(self, facts: AttemptFacts, told_end: NodeEnd) -> AttemptFinding:
        """Take over what the monitor found, here or on another node; the deaths are its doing."""
        incident_id = told_end.incident or ""
        found: Incident | None = None
        with contextlib.suppress(KeyError, OSError):
            found = self._store.get(incident_id)
        cause = found.cause if found is not None and found.cause else "unknown"
        seen = classification(cause, found.confidence or 0.0 if found is not None else 0.0)
        known = weigh(seen, facts.node_told)  # a GPU that is gone makes its ranks wait for ever
        # What the culprits raised counts where the monitor found it: later it may be our signals' doing.
        raised = found is not None and any(item.source == "exception" for item in found.evidence)
        culprits = tuple(culprit.rank for culprit in found.culprits) if found is not None and raised else ()
        end = crash.attempt_end(facts, FirstDeath(culprits, (), known))
        if known.cause != cause:
            self._correct(incident_id, known)
        elif found is not None and found.action:
            lines = crash.users_lines(found.culprits)
            end = attrs.evolve(end, action=found.action, category=found.category or "hang", lines=lines)
        end = attrs.evolve(end, free=told_end.free, final=told_end.final)
        if told_end.final is not None and known.cause == cause:
            with contextlib.suppress(KeyError, OSError):
                self._store.update(incident_id, action="stop")
        who = ", ".join(f"rank {culprit.rank}" for culprit in found.culprits[:4]) if found else ""
        told = f"the job hung ({who or 'no rank can be named'}: {known.cause})"
        return AttemptFinding(end, told, incident_id or None)

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

    def _find_standing(self, facts: AttemptFacts, at: float) -> Incident | None:
        """Return the hang that stood at the time `at`, which may not be written yet."""
        found = standing_hang(self._store, facts, at)
        return found if found is None or isinstance(found, Incident) else found.hang(facts.attempt, at, "")

    def _standing(
        self, facts: AttemptFacts, by: str, at: float | None = None, *, late_counts: bool = False
    ) -> Incident | None:
        """Write down what stood still when this attempt was ended by somebody, and return it."""
        at = _began_to_end(facts) if at is None else at
        return record_standing(
            self._store,
            self._journal,
            facts,
            at,
            by,
            corrected=lambda hang: _corrected(hang, facts),
            late_counts=late_counts,
        )

    # -- other nodes

    def _told_by_other_nodes(
        self, facts: AttemptFacts, first: FirstDeath, headline: str
    ) -> tuple[NodeEnd | None, tuple[Peer, ...]]:
        """Return the end that another node reports as the cause of ours, None where this node is to report.

        And the nodes that are gone, where that is the cause.
        """
        if not self._relay.active:
            return None, ()
        own = _own_end(facts, first, headline, None)
        if own.is_cause:
            self._relay.note_fault()
        self._relay.tell_end(own.to_json())

        def decided(ends: Mapping[int, Mapping[str, Any]], faults: int, waited_s: float) -> bool:
            known = _read(ends, own)
            who = reporter(known, facts.nodes)
            told = sum(1 for end in known.values() if end.order is not None)
            over = waited_s > patience_s(faults, told, self._term_grace_s)
            spoken = who is not None and (known[who].incident is not None or known[who].joins)
            return over or who == own.node or spoken

        ends = _read(self._relay.wait_for_ends(decided, self._term_grace_s + AFTER_FAULT_S), own)
        away: tuple[Peer, ...] = ()
        if len(ends) < facts.nodes and not any(end.is_cause for end in ends.values()):
            ends, away = self._who_is_gone(facts, own)
        who = reporter_at_last(ends)
        return (None if who is None or who == own.node else ends[who]), away

    def _who_is_gone(self, facts: AttemptFacts, own: NodeEnd) -> tuple[dict[int, NodeEnd], tuple[Peer, ...]]:
        """Wait until each node has told its end or is known to be gone; return the ends and who is gone."""

        def settled(ends: Mapping[int, Mapping[str, Any]], faults: int, waited_s: float) -> bool:
            told = _read(ends, own)
            real = any(end.is_cause for end in told.values())
            return real or self._relay.store_is_lost or all_settled(facts.nodes, told, self._relay.silent_s)

        ends = _read(self._relay.wait_for_ends(settled, PATIENCE_S), own)
        if any(end.is_cause for end in ends.values()):
            return ends, ()
        away = gone_nodes(facts.peers, ends, self._relay.silent_s, self._lost_store(facts))
        who = min(ends)
        if away and who != own.node:  # its incident comes now
            ends = _read(
                self._relay.wait_for_ends(lambda e, *_: bool(e.get(who, {}).get("incident")), _RECORDED_S), own
            )
        return ends, away

    def _lost_store(self, facts: AttemptFacts) -> str | None:
        """Return the host of the store where it does not answer any more."""
        return facts.store_host if self._relay.store_is_lost else None

    def _as_known(self, end: AttemptEnd, incident_id: str | None) -> AttemptEnd:
        """Put the cause that another node has found in the place of our symptoms; what it does of it is its own."""
        with contextlib.suppress(KeyError, OSError):
            known = self._store.get(incident_id or "")
            if known.cause:
                category, confidence = known.category or end.category, known.confidence or 0.0
                return attrs.evolve(end, cause=known.cause, category=category, confidence=confidence)
        return end

    def _tell_stop(self, facts: AttemptFacts, stood: str | None, *, wait_for_record: bool = True) -> str | None:
        """Tell the other nodes that this one left, and wait until all have; the first records it for all.

        Returns what stood still, as this node or another one has seen it.
        """
        if not self._relay.active:
            return stood
        own = facts.node_number
        self._relay.tell_end(NodeEnd(own, headline=_LEFT, stood=stood).to_json())
        wait_s = time_to_leave(_ALL_LEFT_S)

        def decided(ends: Mapping[int, Mapping[str, Any]], faults: int, waited_s: float) -> bool:
            # The node with the store may leave before we have read its word, and takes all other words with it.
            return len({own, *ends}) >= facts.nodes or self._relay.store_is_lost

        ends = self._relay.wait_for_ends(decided, wait_s)
        if own and wait_for_record:
            self._await_record("preemption", facts, min(wait_s, _RECORDED_S))
        told = [read_end(node, data).stood for node, data in sorted(ends.items())]
        return stood or next(filter(None, told), None)

    def _await_record(self, kind: str, facts: AttemptFacts, wait_s: float) -> None:
        self._relay.wait_for_ends(lambda *_: self._recorded(kind, facts) is not None, wait_s)

    def _recorded(self, kind: str, facts: AttemptFacts) -> str | None:
        """Return the incident of that kind of this attempt, should the ranks or another node have recorded it."""
        with contextlib.suppress(OSError):
            for known in self._store.of_attempt(facts.attempt, facts.began_at, kind):
                return known.id
        return None

    # -- incidents

    def note_restart(self, incident_id: str) -> None:
        """Correct an incident that advised to stop: what may have been a coincidence is tried once more."""
        with contextlib.suppress(KeyError, OSError):
            if self._store.get(incident_id).action in ("stop", "none"):
                self._store.update(incident_id, action="restart")

    def _note_aborted(self, facts: AttemptFacts) -> str | None:
        """Record that ranks were aborted after their scripts had ended, where nothing else went wrong; its id."""
        found = crash.aborted_incident(facts, time.time())
        if found is None or any(end.exit_code not in (0, EXIT_PREEMPTED) for end in facts.exits):
            return None
        say(crash.aborted_words(facts))
        return record(self._store, self._journal, "crash", found, facts).id

    def _note_recovery(self, facts: AttemptFacts) -> None:
        """Close what this attempt recovered from, should it have been over before the monitor's next look."""
        with contextlib.suppress(OSError):
            if any(i.attempt is not None and i.attempt < facts.attempt for i in self._store.open_recoveries()):
                pages = [trace.snapshot for trace in facts.traces.values() if trace.snapshot is not None]
                RecoveryWatch(self._store, self._journal).look(facts.attempt, pages, sorted(facts.traces))

    def _story(self, facts: AttemptFacts, end: AttemptEnd, first: FirstDeath) -> Account:
        """Return who asked the job to leave, what came of it, and who hindered that."""
        return account(
            facts.events,
            facts.pages,
            node=facts.node,
            saved=end.checkpoint_after,
            saved_here=end.made_checkpoint,
            died={
                one.rank: describe_exit(one.exit_code)
                for one in facts.exits
                if one.rank in first.culprits and one.rank not in facts.asked
            },
            cut=find_cut(facts),
        )

    def _preemption(self, facts: AttemptFacts, end: AttemptEnd, story: Account) -> str | None:
        """Record that the job left."""
        exits = {e["rank"]: e["exit_code"] for e in facts.told_of(Event.RANK_EXIT) if e.get("exit_code") is not None}
        incident = story.incident(facts.attempt, time.time(), {**exits, **end.exit_codes})
        return record(self._store, self._journal, "preemption", incident, facts).id
