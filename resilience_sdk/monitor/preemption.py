"""The coordinator of a stop: the monitor hears that the job should leave, and has all ranks agree.

Each node's monitor shows its own ranks the newest proposal. One of them, that of the first node, makes proposals and
asks for decisions; whatever it forgets when it dies stands in the words (`preemption.cell`) and on the pages.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk import console
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.hindrances import Hindrances
from resilience_sdk.monitor.notices import Notices, on_page
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.stop_nodes import StopNodes
from resilience_sdk.preemption import cell
from resilience_sdk.preemption import protocol as agreement
from resilience_sdk.preemption.asking import IN_VAIN, Asker
from resilience_sdk.preemption.protocol import CoordinatorMove, Decision, Proposal, RankView
from resilience_sdk.preemption.side import MONITOR, RANKS, coordinator_word
from resilience_sdk.rank_page import ControlWords

_POLL_S = 0.005  # while a stop is being agreed
_POLL_BETWEEN_NODES_S = 0.02
_SLOW_POLL_S = 0.1  # when that takes long: a rank may evaluate for minutes
_IN_VAIN_S = 2.0  # after the time to leave was over, and nobody has left
_RATE_S = 1.0  # over which the rate of checks is measured
_LEAST_RATE_S = 0.4  # the same, when a stop is asked for before that
_NANO = 1e9


class StopCoordinator:
    """Looks for notices and runs the rounds of `preemption.protocol`. The monitor's only thread."""

    def __init__(self, pages: Path, journal: Journal, notices: Notices, *, grace_s: float, host: str) -> None:
        """Agree in `pages`. A notice without an end of its own leaves `grace_s` seconds."""
        self._pages = pages
        self._journal = journal
        self._notices = notices
        self._grace_s = grace_s
        self._host = host
        self._words: dict[Path, ControlWords] = {}
        self.begin(0, {})

    def begin(self, attempt: int, announcement: Mapping[str, Any]) -> None:
        """Begin an attempt; `announcement` is our launcher's, empty where nobody has made one."""
        for words in self._words.values():
            words.close()
        self._words.clear()
        self._attempt = attempt
        self._cell = cell.Words(self._pages, attempt)
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
        self._hear(pages)
        if self._asked is None:
            return None
        own = {rank: RankView(words.checks, words.acknowledged) for rank, words in pages.items()}
        is_whole = len(pages) == len(ranks) and all(watched.alive for watched in ranks)
        self._nodes.tell(self._asked, self._left_s, own, is_whole=is_whole, failed=failed)
        self._hindrances.begin(self._left_s, own)
        self._read_proposals()
        if failed or any(node.failed for node in self._nodes.others):
            self._tear_down(pages)
            return None if self._over else _POLL_BETWEEN_NODES_S
        self._show(pages)
        self._say_if_in_vain()
        views = self._views(own)
        is_whole = is_whole and len(views) == world_size and all(node.is_whole for node in self._nodes.others)
        if not is_whole and self._is_for_monitors():
            if self._proposal is not None and self._cell.decision(self._round) is Decision.COMMIT:
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
        path = watched.stem.with_name(watched.stem.name + ".page")
        if path not in self._words:
            try:
                self._words[path] = words = ControlWords(path)
            except OSError:
                return None
            if self._deadline_ns:
                words.set_deadline(self._deadline_ns)  # a rank that starts later than the others has no more time
        return self._words[path]

    # -- notices

    def _hear(self, pages: Mapping[int, ControlWords]) -> None:
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
        try:
            return bool(
                json.loads((self._pages / f"ending-{self._attempt}.json").read_bytes())["reason"] != "preemption"
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

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
        if decided is not Decision.COMMIT and console.say_once(
            "in vain", f"{IN_VAIN} ({self._asked}); ranks that no signal ends go on"
        ):
            self._journal.emit(Event.DEGRADED, what="preemption", why=IN_VAIN)

    def _is_for_monitors(self) -> bool:
        """Tell whether the ranks leave the agreement to monitors, and not to themselves."""
        return self._nodes.count > 1 or cell.read_link(coordinator_word(self._pages, self._attempt)) == MONITOR

    def _is_for_ranks(self) -> bool:
        """Tell whether the ranks agree among themselves; neither that nor the opposite before their first checks."""
        return self._nodes.count == 1 and cell.read_link(coordinator_word(self._pages, self._attempt)) == RANKS

    def _read_proposals(self) -> None:
        """Take the newest proposal that stands, whoever made it."""
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
        if decision is Decision.COMMIT:
            self._over = True
        if self._over or not self._nodes.coordinates():
            return
        move = agreement.coordinator_move(self._proposal, decision, list(views.values()))
        if move is CoordinatorMove.PROPOSE:
            self._propose([view.count for view in views.values()])
        elif move in (CoordinatorMove.COMMIT, CoordinatorMove.VOID):
            self._cell.decide(self._round, Decision.COMMIT if move is CoordinatorMove.COMMIT else Decision.VOID)

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
        decision = None if self._proposal is None else self._cell.decide(self._round, Decision.VOID)
        if self._proposal is not None and decision is None:
            return  # not known yet
        self._over = True
        if decision is not Decision.COMMIT:
            for words in pages.values():
                words.propose(agreement.TEARDOWN)


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
