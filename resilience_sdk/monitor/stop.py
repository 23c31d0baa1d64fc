"""The coordinator of a stop.

Hears that the job should leave, agrees with the other nodes, and names the ranks that hinder it.

As with `nodes`, each writes a file, reads one, and our launcher carries between them. It is a word of its own,
because it changes with every check and must not make the evidence about a hang look newer than it is.

Each node's monitor shows its own ranks the newest proposal. One of them, that of the first node, makes proposals and
asks for decisions; whatever it forgets when it dies stands in the words (`preemption.agreement`) and on the pages.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cluster import leader
from resilience_sdk.cluster.membership import STOPS, NodePlace, PeerFile
from resilience_sdk.core import console
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.json_records import from_text, to_text
from resilience_sdk.core.plain_file import read_bytes
from resilience_sdk.incidents import Culprit
from resilience_sdk.monitor.notices import LeaveRequest, Notices, on_page
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.postmortem.preemption import Hindered, Phase, culprit_of, hindered_by, phase_of
from resilience_sdk.preemption import agreement
from resilience_sdk.preemption.agreement import CoordinatorMove, Proposal, RankView, StopDecision, pace
from resilience_sdk.preemption.context import MONITOR, RANKS, coordinator_word
from resilience_sdk.preemption.reasons import IN_VAIN, Asker, Hindrance
from resilience_sdk.recorder.page_writer import ControlWords

OWN, PEERS = STOPS.own, STOPS.peers
_PACE_S = 0.1  # of counts; news are told at once
_FRESH_S = 2.0
_MOST_BYTES = 1 << 20


@attrs.frozen
class NodeStop:
    """One node of a job that was asked to leave, at one moment."""

    attempt: int
    node: int
    name: str
    turn: int
    """One more with each writing, so that a node that is gone can be told from one that has no news."""
    asked: str
    """Which node was asked first, and by whom."""
    left_s: float
    """Until the end, in seconds when this was written: no clock of one host means anything on another."""
    ranks: Mapping[int, RankView] = attrs.field(factory=dict)
    is_whole: bool = True
    """Whether all ranks of this node live."""
    failed: bool = False
    """Whether one of them has died of its own."""
    urgent: bool = True

    @property
    def news(self) -> object:
        """What must not wait: all but how far everybody is."""
        acknowledged = {rank: (view.acknowledged, view.count > 0) for rank, view in self.ranks.items()}
        return acknowledged, self.is_whole, self.failed


@attrs.frozen
class _Heard:
    stop: NodeStop
    at_s: float  # of our monotonic clock, when its newest word was read


class StopNodes:
    """What is told to and heard from the other nodes about a stop. The monitor's only thread."""

    def __init__(self, pages: Path, attempt: int, announcement: Mapping[str, Any], host: str) -> None:
        """Use the files in `pages`; `announcement` is our launcher's and says which of how many nodes this is."""
        self._pages = pages
        self._attempt = attempt
        place = NodePlace.of(announcement, host)
        self.me, self.count, self.name = place.me, place.count, place.name
        self._peers = PeerFile(pages / PEERS)
        self._heard: dict[int, _Heard] = {}
        self._told: NodeStop | None = None
        self._told_at = float("-inf")

    @property
    def others(self) -> list[NodeStop]:
        """The last word of each other node."""
        return [heard.stop for _, heard in sorted(self._heard.items())]

    def coordinates(self) -> bool:
        """Tell whether it is for this node to propose and decide: no node before it has spoken lately."""
        heard_at_s = {node: heard.at_s for node, heard in self._heard.items()}
        return leader.leads(self.me, heard_at_s, time.monotonic() - _FRESH_S * pace(self.count))

    def read(self) -> None:
        """Take what has come. Costs one stat while nothing has."""
        if self.count == 1:
            return
        heard = self._peers.news(self._attempt)
        for text in heard.texts if heard is not None else ():
            stop = decode(text)
            if stop is None or stop.attempt != self._attempt or stop.node == self.me:
                continue
            known = self._heard.get(stop.node)
            if known is None or known.stop.turn != stop.turn:
                self._heard[stop.node] = _Heard(stop, time.monotonic())

    def tell(
        self, asked: str, left_s: float, ranks: Mapping[int, RankView], *, is_whole: bool, failed: bool = False
    ) -> None:
        """Tell how it stands here: news at once, all else now and then."""
        if self.count == 1:
            return
        turn = 1 + (self._told.turn if self._told is not None else time.monotonic_ns())  # not that of a monitor before
        stop = NodeStop(self._attempt, self.me, self.name, turn, asked, left_s, ranks, is_whole, failed)
        is_news = self._told is None or self._told.news != stop.news
        if not is_news and time.monotonic() - self._told_at < _PACE_S * pace(self.count):
            return
        self._told, self._told_at = stop, time.monotonic()
        try:
            write_whole(self._pages / OWN, to_text(stop))
        except OSError as error:
            console.say_once("stop", f"the other nodes cannot be told that this one is asked to leave: {error}")


def decode(text: str) -> NodeStop | None:
    """Return what a node has told, or None for what is no such word."""
    return from_text(NodeStop, text) if len(text) <= _MOST_BYTES else None


_SILENT_S = 5.0  # after which a rank without a check is named
_LATE_S = 30.0  # after which one is named that has not checked since; an optimizer step may take that long


@attrs.define
class Hindrances:
    """One attempt's. The monitor's only thread."""

    journal: Journal
    nodes: StopNodes
    _since_s: float | None = None
    _half_s: float = 0.0
    _counts: Mapping[int, int] = attrs.field(factory=dict)  # how often ranks had checked when the job was asked
    _named: set[Hindrance] = attrs.field(factory=set)

    def begin(self, left_s: float, own: Mapping[int, RankView]) -> None:
        """Note that the job was asked to leave, within `left_s` seconds; `own` are the ranks of this node."""
        if self._since_s is None:
            self._since_s, self._half_s = time.monotonic(), left_s / 2
            self._counts = {rank: view.count for rank, view in own.items()}

    def look(self, ranks: Sequence[WatchedRank], own: Mapping[int, RankView]) -> bool:
        """Tell whether every rank of the job calls `check()`; name those that do not, or not any more."""
        silent = {
            (node, rank) for node, views in self._views(own).items() for rank, view in views.items() if not view.count
        }
        everybody = sum(map(len, self._views(own).values()))
        if silent and len(silent) < everybody and self._is_time(_SILENT_S):
            ours = {rank for node, rank in silent if node == self.nodes.name}
            others = [Culprit(rank, node) for node, rank in sorted(silent) if node != self.nodes.name]
            self._name(Hindrance.NO_CHECK, self._culprits(ranks, ours), others)
        done = {watched.rank for watched in ranks if watched.snapshot.done}  # what follows is no loop that could check
        late = {rank for rank, view in own.items() if view.count and view.count == self._counts.get(rank)} - done
        if late and not silent and self._is_time(_LATE_S):
            self._name(Hindrance.LATE, self._culprits(ranks, late))
        return not silent

    def missing(self, ranks: Sequence[WatchedRank], unseen: Collection[int]) -> None:
        """Name ranks that have left early, or that no monitor sees."""
        if not self._is_time(_SILENT_S) or self._named & {Hindrance.ENDED, Hindrance.UNSEEN}:
            return
        ended = {watched.rank for watched in ranks if not watched.alive}
        if ended and phase_of(watched.snapshot for watched in ranks) is Phase.OVER:
            return  # its loop has come to its end as on all ranks, and the others are in what follows that
        if ended:
            self._name(Hindrance.ENDED, self._culprits(ranks, ended))
        elif unseen:  # else one of another node, which says it
            self._name(Hindrance.UNSEEN, [Culprit(rank) for rank in sorted(unseen)])

    def _is_time(self, patience_s: float) -> bool:
        return self._since_s is not None and time.monotonic() - self._since_s > min(patience_s, self._half_s)

    def _views(self, own: Mapping[int, RankView]) -> dict[str, Mapping[int, RankView]]:
        return {self.nodes.name: own, **{node.name: node.ranks for node in self.nodes.others}}

    def _culprits(self, ranks: Sequence[WatchedRank], wanted: Collection[int]) -> list[Culprit]:
        found = {watched.rank: watched for watched in ranks if watched.rank in wanted}
        return [culprit_of(found[rank].snapshot, self.nodes.name) for rank in sorted(found)]

    def _name(self, kind: Hindrance, ours: Sequence[Culprit], others: Sequence[Culprit] = ()) -> None:
        """Say it once, with those of other nodes; what is journalled is of this node, as each journals its own."""
        if kind in self._named:
            return
        self._named.add(kind)
        found: Hindered = hindered_by(kind, (*ours, *others))
        outcome = "the stop waits for it" if kind is Hindrance.LATE else "so no stop can be agreed"
        console.say(f"{found}, {outcome}; {found.cure}")
        if ours:
            self.journal.emit(
                Event.DEGRADED,
                what="preemption",
                why=str(hindered_by(kind, tuple(ours))),
                hindrance=kind.value,
                ranks=[culprit.rank for culprit in ours],
                culprits=[attrs.asdict(culprit) for culprit in ours],
            )


_POLL_S = 0.005  # while a stop is being agreed
_POLL_BETWEEN_NODES_S = 0.02
_SLOW_POLL_S = 0.1  # when that takes long: a rank may evaluate for minutes
_IN_VAIN_S = 2.0  # after the time to leave was over, and nobody has left
_RATE_S = 1.0  # over which the rate of checks is measured
_LEAST_RATE_S = 0.4  # the same, when a stop is asked for before that
_NANO = 1e9


class StopCoordinator:
    """Looks for notices and runs the rounds of `preemption.agreement`. The monitor's only thread."""

    def __init__(self, pages: Path, journal: Journal, notices: Notices, *, grace_s: float, host: str) -> None:
        """Agree in `pages`. A notice without an end of its own leaves `grace_s` seconds."""
        self._pages = pages
        self._journal = journal
        self._notices = notices
        self._grace_s = grace_s
        self._host = host
        self._words: dict[Path, tuple[int, ControlWords]] = {}  # with the file that is mapped
        self.begin(0, {})

    def begin(self, attempt: int, announcement: Mapping[str, Any]) -> None:
        """Begin an attempt; `announcement` is our launcher's, empty where nobody has made one."""
        for _, words in self._words.values():
            words.close()
        self._words.clear()
        self._attempt = attempt
        self._cell = agreement.FileCell(self._pages, attempt)
        self._nodes = StopNodes(self._pages, attempt, announcement, self._host)
        self._hindrances = Hindrances(self._journal, self._nodes)
        self._rate = _CheckRate()
        self._asked: str | None = None  # by whom, in words
        self._knows_signal = False
        self._asked_s = 0.0
        self._deadline_ns = 0
        self._proposal: Proposal | None = None
        self._over = False

    def look(self, ranks: Sequence[WatchedRank], world_size: int, failed: bool) -> float | None:
        """Look once; return how soon to look again, None = no haste. `failed`: a rank has died of its own."""
        if not ranks or self._over:
            return None
        pages = {watched.rank: words for watched in ranks if (words := self._map(watched)) is not None}
        self._rate.note(time.monotonic(), max((words.checks for words in pages.values()), default=0))
        self._nodes.read()
        self._hear(pages, ranks)
        if self._asked is None:
            return None
        own = {rank: RankView(words.checks, words.acknowledged) for rank, words in pages.items()}
        is_whole = len(pages) == len(ranks) and all(watched.alive for watched in ranks)
        self._nodes.tell(self._asked, self._left_s, own, is_whole=is_whole, failed=failed)
        self._hindrances.begin(self._left_s, own)
        self._read_proposals(pages)
        if failed or any(node.failed for node in self._nodes.others):
            self._tear_down(pages)
            return None if self._over else _POLL_BETWEEN_NODES_S
        self._show(pages)
        self._say_if_in_vain()
        views = self._views(own)
        is_whole = is_whole and len(views) == world_size and all(node.is_whole for node in self._nodes.others)
        if not is_whole and self._is_for_monitors():
            if self._proposal is not None and self._cell.decision(self._round) is StopDecision.COMMIT:
                self._over = True  # they have stopped, and leave one after the other
                return None
            self._hindrances.missing(ranks, set(range(world_size)) - views.keys())
        if not (is_whole and self._hindrances.look(ranks, own)):
            return None if self._nodes.count == 1 else _SLOW_POLL_S
        self._negotiate(views)
        return None if self._over else self._wait_s()

    def _wait_s(self) -> float:
        quick_s = _POLL_S if self._nodes.count == 1 else _POLL_BETWEEN_NODES_S
        return min(_SLOW_POLL_S, max(quick_s, (time.monotonic() - self._asked_s) / 50))

    def _map(self, watched: WatchedRank) -> ControlWords | None:
        inode, words = self._words.get(watched.stem, (0, None))
        if words is None or inode != watched.inode:
            path = watched.stem.with_name(watched.stem.name + ".page")
            try:
                mapped = ControlWords(path)
            except OSError:
                return words
            if words is not None:
                words.close()
            words = mapped
            self._words[watched.stem] = watched.inode, words
            if self._deadline_ns:
                words.set_deadline(self._deadline_ns)  # a rank that starts later than the others has no more time
        return words

    # -- notices

    def _hear(self, pages: Mapping[int, ControlWords], ranks: Sequence[WatchedRank]) -> None:
        """Take a notice of this node or of another: either counts for all.

        A request ends nobody, so a signal that comes after one is told too.
        """
        for node in self._nodes.others:
            if self._asked is None:
                console.say(f"another node was asked to leave ({node.asked}): all nodes stop at one check")
            self._note(node.asked, node.left_s, pages)
        if self._knows_signal or (self._asked is not None and self._nodes.count > 1):
            return  # between nodes our launcher tells of a later signal itself, and each look has to be quick
        noticed = ((rank, words.notice) for rank, words in pages.items())
        asked = self._notices.look(noticed) if self._asked is None else on_page(noticed, Asker.SIGNAL)
        is_signal = asked is not None and asked.kind is Asker.SIGNAL
        if asked is None or self._is_being_ended():
            return
        left_s = self._grace_s if asked.end_unix is None else max(0.0, asked.end_unix - time.time())
        self._knows_signal = is_signal
        if is_signal:
            self._say_heard(asked, left_s, ranks)
        self._note(f"{self._nodes.name}: {asked.source}", left_s, pages)
        known: dict[str, Any] = {"time_left_s": self._left_s} if self._deadline_ns else {}
        self._journal.emit(Event.PREEMPT_NOTICE, **asked.facts(), **known)

    @property
    def _left_s(self) -> float:
        """Seconds until the time to leave is over; infinity when nobody gave an end."""
        return max(0.0, self._deadline_ns / _NANO - time.monotonic()) if self._deadline_ns else math.inf

    def _is_being_ended(self) -> bool:
        """Tell whether the signals that ranks hear end a hung or failed attempt: who sends them says so before."""
        if (self._pages / f"verdict-{self._attempt}.json").exists():
            return True
        return self._ends_for() not in (None, "preemption")

    def _ends_for(self) -> str | None:
        """Return why our launcher ends the ranks; None where it does not, or there is none of ours."""
        try:
            return str(json.loads(read_bytes(self._pages / f"ending-{self._attempt}.json"))["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _say_heard(self, asked: LeaveRequest, left_s: float, ranks: Sequence[WatchedRank]) -> None:
        """Say that a rank was asked to leave by a signal; what our launcher was asked and passes on, it says itself."""
        if self._ends_for() is not None:
            return
        within = f" within {left_s:.0f} s" if math.isfinite(left_s) else ""
        is_over = phase_of(watched.snapshot for watched in ranks) is Phase.OVER
        what = "its training is done, and it ends by itself" if is_over else f"all ranks are to save and leave{within}"
        console.say(f"{asked.source} heard: {what}")

    def _note(self, asked: str, left_s: float, pages: Mapping[int, ControlWords]) -> None:
        """Note who asked, once; the time to leave only ever gets shorter, also by what a monitor before this told."""
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._asked_s = asked, now
        known = [self._deadline_ns, *(words.deadline for words in pages.values())]
        told = int((now + left_s) * _NANO) if math.isfinite(left_s) else 0
        deadline_ns = min(filter(None, (told, *known)), default=0)
        if deadline_ns != self._deadline_ns:
            self._deadline_ns = deadline_ns
            for words in pages.values():
                words.set_deadline(deadline_ns)

    # -- the agreement

    def _views(self, own: Mapping[int, RankView]) -> dict[int, RankView]:
        views: dict[int, RankView] = {}
        for node in self._nodes.others:
            views.update(node.ranks)
        return {**views, **own}

    def _say_if_in_vain(self) -> None:
        """Say, once, that the time to leave is over and nobody has left; a stop may still be agreed."""
        end_s = self._deadline_ns / _NANO
        if not end_s or time.monotonic() < end_s + _IN_VAIN_S or self._is_for_ranks():
            return
        decided = None if self._proposal is None else self._cell.decision(self._round)
        if decided is not StopDecision.COMMIT and console.say_once(
            "in vain", f"{IN_VAIN} ({self._asked}); ranks that no signal ends go on"
        ):
            self._journal.emit(Event.DEGRADED, what="preemption", why=IN_VAIN)

    def _is_for_monitors(self) -> bool:
        """Tell whether the ranks leave the agreement to monitors, and not to themselves."""
        return self._nodes.count > 1 or agreement.read_link(coordinator_word(self._pages, self._attempt)) == MONITOR

    def _is_for_ranks(self) -> bool:
        """Tell whether the ranks agree among themselves; neither that nor the opposite before their first checks."""
        return self._nodes.count == 1 and agreement.read_link(coordinator_word(self._pages, self._attempt)) == RANKS

    def _read_proposals(self, pages: Mapping[int, ControlWords]) -> None:
        """Take the newest proposal that stands, whoever made it.

        Where the words were removed with their directory, the pages still show it.
        """
        shown = max(
            filter(None, (agreement.unpack(words.control) for words in pages.values())), key=_round_of, default=None
        )
        if shown is not None and shown.round > self._round and self._nodes.count == 1:
            self._cell.propose(shown)
            self._proposal = self._cell.proposal(shown.round)
        while (found := self._cell.proposal(1 + self._round)) is not None:
            self._proposal = found

    @property
    def _round(self) -> int:
        return 0 if self._proposal is None else self._proposal.round

    def _show(self, pages: Mapping[int, ControlWords]) -> None:
        if self._proposal is None:
            return
        control = agreement.pack(self._proposal)
        for words in pages.values():
            if words.control != control:
                words.propose(control)

    def _negotiate(self, views: Mapping[int, RankView]) -> None:
        decision = None if self._proposal is None else self._cell.decision(self._round)
        if decision is StopDecision.COMMIT:
            self._over = True
        if self._over or not self._nodes.coordinates():
            return
        move = agreement.coordinator_move(self._proposal, decision, list(views.values()))
        if move is CoordinatorMove.PROPOSE:
            self._propose([view.count for view in views.values()])
        elif move in (CoordinatorMove.COMMIT, CoordinatorMove.VOID):
            self._cell.decide(self._round, StopDecision.COMMIT if move is CoordinatorMove.COMMIT else StopDecision.VOID)

    def _propose(self, counts: Sequence[int]) -> None:
        rate = self._rate.known(time.monotonic())
        if rate is None and self._nodes.count > 1:
            return  # a void round between nodes costs seconds, on one node nothing
        lead = agreement.lead_of(1 + self._round, rate or 0.0, self._nodes.count)
        proposal = agreement.next_proposal(self._round, counts, lead)
        if proposal is None:
            self._over = True
        else:
            self._cell.propose(proposal)

    def _tear_down(self, pages: Mapping[int, ControlWords]) -> None:
        """Say that who was asked to leave did not get a preemption, unless a stop is agreed.

        A rank that left after the agreed stop may look like one that failed; the others must still stop there.
        """
        decision = None if self._proposal is None else self._cell.decide(self._round, StopDecision.VOID)
        if self._proposal is not None and decision is None:
            return  # not known yet
        self._over = True
        if decision is not StopDecision.COMMIT:
            for words in pages.values():
                words.propose(agreement.TEARDOWN)


def _round_of(proposal: Proposal) -> int:
    return proposal.round


class _CheckRate:
    """How often ranks check, from the highest count at each look."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._rate: float | None = None
        self._most = 0

    def note(self, now: float, most: int) -> None:
        """Note the highest count."""
        self._most = most
        if self._first is None:
            self._first = now, most
        elif now - self._first[0] >= _RATE_S:
            self._rate = self.known(now)
            self._first = now, most

    def known(self, now: float) -> float | None:
        """Return the checks per second of late; None when nobody has looked for long enough."""
        since, before = self._first or (now, 0)
        if now - since < _LEAST_RATE_S:
            return self._rate
        return max(self._rate or 0.0, (self._most - before) / (now - since))
