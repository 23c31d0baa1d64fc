"""The other nodes of the job, as this node's monitor knows them.

The monitor writes what it tells into `node.json` and reads what the others told from `peers.json`; a relay (our
launcher, which has torch and a store) carries them. Where there is none, nothing is heard and ranks of other
nodes stay unseen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cluster.membership import HANGS, NodePlace, PeerFile
from resilience_sdk.core import console
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.hang.evidence import FlightRecord
from resilience_sdk.hang.timers import HangRules, RankState
from resilience_sdk.incidents import Evidence
from resilience_sdk.monitor.evidence import CloseLook
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.node_summary import (
    SILENT_S,
    HangVerdict,
    NodeSummary,
    bounded_facts,
    decode,
    encode,
    evidence_of_peers,
    is_fresh,
    lost_states,
    states_of_peers,
    summarize,
)
from resilience_sdk.recorder.page_reader import RankSnapshot

OWN, PEERS = HANGS.own, HANGS.peers
_CALM_S = 2.0
_QUICK_S = 0.15
_SLOW_S = 1.0  # of an exchange that has gone on for long: a job that is slow may be so for an hour
_ASKED_S = 3.0  # how long a request for a close look is answered
_LOOK_LASTS_S = 8.0
_HEARD_S = 0.7
_POLL_S = 0.02


class Nodes:
    """What is told to and heard from the other nodes. Used by the monitor's only thread."""

    def __init__(self, pages: Path, learner: Learner, rules: HangRules, name: str) -> None:
        """Use the files in `pages`; `learner` has the deadlines of this node, `name` is this host's."""
        self._pages = pages
        self._learner = learner
        self._rules = rules
        self.name = name
        self._me = 0
        self._count = 1
        self._attempt = -1
        self._summaries: dict[int, NodeSummary] = {}
        self._received_ns: dict[int, int] = {}
        self._peers = PeerFile(pages / PEERS)
        self._told: NodeSummary | None = None
        self._told_at = float("-inf")
        self._tense_since: float | None = None
        self._beaten = False

    def begin(self, attempt: int, announcement: Mapping[str, Any]) -> None:
        """Begin an attempt; `announcement` is our launcher's and says which of how many nodes this is."""
        self._attempt = attempt
        place = NodePlace.of(announcement, self.name)
        self._me, self._count, self.name = place.me, place.count, place.name
        self._peers = PeerFile(self._pages / PEERS)
        self._summaries, self._received_ns = {}, {}
        self._told = self._tense_since = None
        self._told_at = float("-inf")
        self._beaten = False

    @property
    def several(self) -> bool:
        """Whether there are other nodes that may be heard of."""
        return self._count > 1

    @property
    def me(self) -> int:
        """Number of this node."""
        return self._me

    # -- hearing

    def read(self) -> None:
        """Take what has come. Costs one stat while nothing has."""
        if not self.several:
            return
        heard = self._peers.news(self._attempt)
        for text in heard.texts if heard is not None else ():
            summary = decode(text)
            if summary is None or summary.attempt != self._attempt or summary.node == self._me:
                continue
            known = self._summaries.get(summary.node)
            if known is None or known.now_ns != summary.now_ns:
                self._summaries[summary.node] = summary
                self._received_ns[summary.node] = time.monotonic_ns()

    def asked(self) -> bool:
        """Tell whether another node has asked for a close look in the last seconds."""
        oldest_ns = time.monotonic_ns() - int(_ASKED_S * 1e9)
        return any(s.wants and self._received_ns[n] > oldest_ns for n, s in self._summaries.items())

    def states(self, own: Sequence[RankState], now_ns: int) -> list[RankState]:
        """Return the ranks of other nodes of which we know for sure how they stood a moment ago, or that are lost."""
        taken = [state.rank for state in own]
        seen = states_of_peers(self._summaries.values(), self._me, self._attempt, now_ns, taken)
        taken += [state.rank for state in seen]
        return seen + lost_states(self._summaries, self._received_ns, self._attempt, self._count, now_ns, taken)

    def evidence(
        self, states: Sequence[RankState], look: CloseLook
    ) -> tuple[dict[int, Sequence[str]], dict[int, FlightRecord | None]]:
        """Return frames and flight records of all those ranks, ours and theirs."""
        frames, flight = evidence_of_peers(self._summaries.values(), [state.rank for state in states])
        return {**frames, **look.frames}, {**flight, **look.flight}

    def facts(self, now_ns: int) -> list[Evidence]:
        """Return what the other nodes' kernels said of their ranks."""
        fresh = [s for s in self._summaries.values() if is_fresh(s, self._me, self._attempt, now_ns)]
        return [Evidence(fact.source, f"{s.name}: {fact.text}") for s in fresh for fact in s.facts]

    def ranks_of(self, own: Sequence[int]) -> dict[int, Sequence[int]]:
        """Return the ranks of this and of every fresh node by its number."""
        now_ns = time.monotonic_ns()
        ranks = {self._me: own}
        for summary in self._summaries.values():
            if is_fresh(summary, self._me, self._attempt, now_ns):
                ranks[summary.node] = [rank.rank for rank in summary.ranks]
        return ranks

    def is_cut_off(self) -> bool:
        """Tell whether this node hears nobody, and is therefore taken to be the one that is cut off.

        Of two nodes that is the second: what it says may not get further than the run directory.
        """
        old_ns = time.monotonic_ns() - int(SILENT_S * 1e9)
        alone = self.several and all(received_ns < old_ns for received_ns in self._received_ns.values())
        return alone and (self._me > 0 or self._count > 2)

    def all_heard(self) -> bool:
        """Tell whether there is fresh evidence from every other node."""
        now_ns = time.monotonic_ns()
        fresh = sum(1 for s in self._summaries.values() if is_fresh(s, self._me, self._attempt, now_ns))
        return fresh >= self._count - 1

    def pages(self) -> list[RankSnapshot] | None:
        """Return the last heard page of every rank elsewhere, first beats in our time; None with one node.

        However old they are: for what does not become untrue, such as a first heartbeat.
        """
        if not self.several:
            return None
        return [
            _moved(rank.snapshot, self._received_ns[node] - summary.now_ns)
            for node, summary in self._summaries.items()
            for rank in summary.ranks
            if rank.snapshot is not None
        ]

    def verdict(self) -> tuple[str, HangVerdict] | None:
        """Return the name of a node that has confirmed a hang of this attempt, and its verdict."""
        for _, summary in sorted(self._summaries.items()):
            if summary.verdict is not None:
                return summary.name, summary.verdict
        return None

    # -- telling

    def tell_calmly(self, states: Sequence[RankState], *, ending: bool) -> None:
        """Tell beats and steps every few seconds, and at once when all ranks have beaten or the end begins."""
        if not self.several:
            return
        beaten = bool(states) and all(s.snapshot and s.snapshot.first_beat_ns is not None for s in states)
        news = (beaten and not self._beaten) or (ending and not (self._told and self._told.ending))
        if not news and time.monotonic() - self._told_at < _CALM_S:
            return
        self._beaten = beaten
        self._tell(states, None, urgent=news, ending=ending)

    def relax(self) -> None:
        """Note that nothing is wrong: the exchange goes back to its calm pace."""
        self._tense_since = None

    def tell_closely(
        self, states: Sequence[RankState], look: CloseLook | None, look_age_s: float, *, wants: bool
    ) -> None:
        """Tell the evidence of a close look; `wants` asks the others for theirs."""
        if not self.several:
            return
        now = time.monotonic()
        self._tense_since = self._tense_since or now
        looked = look is not None and look_age_s < _LOOK_LASTS_S
        told = self._told
        news = told is None or not told.urgent or told.wants != wants or told.looked != looked
        if news or now - self._told_at >= self.pace_s():
            self._tell(states, look if looked else None, urgent=True, wants=wants)

    def pace_s(self) -> float:
        """Return how often to tell while something may be wrong: often at first, calmer in the long run."""
        since = 0.0 if self._tense_since is None else time.monotonic() - self._tense_since
        return min(_SLOW_S, max(_QUICK_S, since / 20))

    def wait_s(self, interval_s: float) -> float:
        """Return how long the monitor may sleep at most: answers are awaited while something may be wrong."""
        if not self.several or self._tense_since is None:
            return interval_s
        return min(interval_s, self.pace_s() / 3)

    def announce(self, verdict: HangVerdict, states: Sequence[RankState], look: CloseLook | None) -> None:
        """Tell the verdict, and wait a moment until all who listened lately have heard it.

        Then their launchers know that the deaths that follow are the end of a hang.
        """
        if not self.several:
            return
        listening = [n for n, s in self._summaries.items() if is_fresh(s, self._me, self._attempt, time.monotonic_ns())]
        self._tell(states, look, urgent=True, verdict=verdict)
        told = self._told
        deadline = time.monotonic() + _HEARD_S
        while told is not None and time.monotonic() < deadline:
            self.read()
            if all(self._summaries[n].heard.get(self._me, 0) >= told.now_ns for n in listening):
                return
            time.sleep(_POLL_S)

    def pass_on(self, verdict: HangVerdict, states: Sequence[RankState]) -> None:
        """Say that the verdict of another node was heard and is followed."""
        self._tell(states, None, urgent=True, verdict=verdict)

    def _tell(
        self,
        states: Sequence[RankState],
        look: CloseLook | None,
        *,
        urgent: bool,
        wants: bool = False,
        ending: bool = False,
        verdict: HangVerdict | None = None,
    ) -> None:
        now_ns = time.monotonic_ns()
        frames = look.frames if look is not None else {}
        flight = look.flight if look is not None else {}
        summary = NodeSummary(
            attempt=self._attempt,
            node=self._me,
            name=self.name,
            now_ns=now_ns,
            ranks=summarize(states, self._learner.book, self._rules, now_ns, frames, flight),
            heard={node: summary.now_ns for node, summary in self._summaries.items()},
            wants=wants,
            urgent=urgent,
            looked=look is not None,
            ending=ending,
            verdict=verdict or (self._told.verdict if self._told is not None else None),
            facts=bounded_facts(look.facts) if look is not None else (),
        )
        self._told, self._told_at = summary, time.monotonic()
        try:
            write_whole(self._pages / OWN, encode(summary))
        except OSError as error:
            console.say_once("node", f"the other nodes cannot be told about this one: {error}")


def _moved(page: RankSnapshot, by_ns: int) -> RankSnapshot:
    first_ns = page.first_beat_ns
    return page if first_ns is None else attrs.evolve(page, first_beat_ns=first_ns + by_ns)
