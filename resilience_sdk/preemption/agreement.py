"""The agreement on a stop: its rules, and the cells in which a round's decision is written once.

All ranks leave at one check, without a collective and whatever the order of memory.

The unit is the number of `check()` calls since the start of the rank, equal on all ranks between collectives. The
coordinator (the monitor of one node) proposes that all stop at check N = highest published count + a lead. A rank
acknowledges a proposal that it sees in time (count <= N). At count N it reads a write-once decision: COMMIT stops,
VOID goes on, and when there is none after a short wait, the rank asks for VOID itself and obeys whoever was first. The
coordinator asks for COMMIT only after *every* rank has acknowledged. So the absence of a message never means anything,
no order between two stores is assumed, and neither a late rank nor the death of the coordinator blocks anybody for
longer than the wait. Proposals are write-once words too, so that any number of monitors may coordinate at once.

Between nodes a word becomes what it is in the store of the rendezvous, and nodes see it a little later. A rank that
sees none for long, because the store or its launcher is gone, decides ALONE: it goes on, with its node. If the others
stop just then, the job ends for the lost connections; with a bounded wait nothing better can be had.

The rules are pure functions; `tests/unit/preemption/test_protocol.py` explores all interleavings. A decision is written
into a `DecisionCell`: of links in the page directory where monitors coordinate, of the process group's store where the
ranks agree by themselves (`reduce`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk.core.job_config import WISH, WORD
from resilience_sdk.core.plain_file import read_bytes

_AT_BITS = 48
_MOST_ROUNDS = (1 << 16) - 2
# Of checks: what the coordinator may need between reading the counts and being read.
_LEAD_S = 0.2
_LEAD_BETWEEN_NODES_S = 1.2  # counts, proposal, acknowledgements and decision take some 0.2 s each on their way
_NODES_AT_FULL_PACE = 16  # more of them exchange words less often, see `pace`
_LEAST_LEAD = 2
_MOST_LEAD = 1 << 24
_MOST_DOUBLINGS = 4  # of a lead that goes by a measured rate: 3 s of checks, 19 s between nodes

# How long a rank waits at the proposed check.
PATIENCE_S = 0.5  # for a coordinator that is busy, before it asks for VOID
PATIENCE_BETWEEN_NODES_S = 2.0  # the same, for the words of the other nodes
ALONE_S = 10.0  # for what was decided: a lost connection to the store is tried again after 5 s

TEARDOWN = (1 << 64) - 1
"""The control word of an attempt that failed: who was asked to leave did not get a preemption."""


class StopDecision(str, Enum):
    """What a round came to; written once."""

    COMMIT = "commit"
    VOID = "void"
    ALONE = "alone"
    """Void as far as this node knows: it could not learn what the others decided."""


@attrs.frozen
class Proposal:
    """All ranks stop at the check number `at`; rounds count from 1."""

    round: int
    at: int


class RankMove(Enum):
    """What a rank does in a check after it has read the control word."""

    GO_ON = "go on"
    ACKNOWLEDGE = "acknowledge"  # and go on
    DECIDE = "decide"  # acknowledge, then read (or make) the decision


class CoordinatorMove(Enum):
    """What the coordinator does after it has read all ranks and the decision."""

    WAIT = "wait"
    PROPOSE = "propose"
    COMMIT = "commit"
    VOID = "void"
    STOPPED = "stopped"


@attrs.frozen
class RankView:
    """What the coordinator reads of a rank."""

    count: int
    acknowledged: int


def pack(proposal: Proposal) -> int:
    """Return the control word of a proposal."""
    return proposal.round << _AT_BITS | proposal.at


def unpack(control: int) -> Proposal | None:
    """Return the proposal of a control word, or None when there is none."""
    if control in (0, TEARDOWN):
        return None
    return Proposal(control >> _AT_BITS, control & (1 << _AT_BITS) - 1)


def rank_move(count: int, proposal: Proposal, acknowledged: int) -> RankMove:
    """Return what a rank does at its check `count`; `acknowledged` is the last round that it has acknowledged."""
    if count > proposal.at:
        return RankMove.GO_ON  # too late for this round, which the coordinator sees from the count
    if count == proposal.at:
        return RankMove.DECIDE
    return RankMove.GO_ON if acknowledged == proposal.round else RankMove.ACKNOWLEDGE


def coordinator_move(
    proposal: Proposal | None, decision: StopDecision | None, ranks: Sequence[RankView]
) -> CoordinatorMove:
    """Return what a coordinator does about the newest `proposal`, None = there is none yet."""
    if proposal is None or decision is StopDecision.VOID:
        return CoordinatorMove.PROPOSE
    if decision is StopDecision.COMMIT:
        return CoordinatorMove.STOPPED
    if decision is StopDecision.ALONE:
        return CoordinatorMove.WAIT  # the others may have stopped: no other round before that is known
    if all(rank.acknowledged == proposal.round for rank in ranks):
        return CoordinatorMove.COMMIT
    if any(rank.count > proposal.at for rank in ranks):
        return CoordinatorMove.VOID
    return CoordinatorMove.WAIT


def next_proposal(last_round: int, counts: Sequence[int], lead: int) -> Proposal | None:
    """Return the next round's proposal, `lead` checks ahead of the fastest rank; None when rounds are used up."""
    return Proposal(last_round + 1, max(counts) + lead) if last_round < _MOST_ROUNDS else None


def lead_of(round_: int, checks_per_s: float, nodes: int = 1) -> int:
    """Return the lead of a round from the measured rate of checks; each void round doubles it.

    Not without end where the rate is known (not 0): rounds that were void before that say nothing about it. In a loop
    of microseconds a dozen of them go by in the first moment, and so often doubled, its lead was a minute.
    """
    latency_s = _LEAD_S if nodes == 1 else _LEAD_BETWEEN_NODES_S * pace(nodes)
    first = max(_LEAST_LEAD, 1 + math.ceil(latency_s * max(0.0, checks_per_s)))
    return min(_MOST_LEAD, first << min(round_ - 1, _MOST_DOUBLINGS if checks_per_s > 0.0 else 24))


def pace(nodes: int) -> float:
    """Return how many times longer than with a few nodes they wait between two words, so that their store keeps up."""
    return max(1.0, nodes / _NODES_AT_FULL_PACE)


class DecisionCell(Protocol):
    """What the rounds of one attempt came to: the first who writes decides, and all obey."""

    def decide(self, round_: int, wanted: StopDecision) -> StopDecision | None:
        """Write what a round comes to unless that stands; return what stands, None where that is not known yet."""
        ...


class FileCell:
    """The cell of pages and monitors: words in the page directory, proposals among them, as this node knows them.

    A word is a symbolic link, because making one is a single step that either wins or finds the winner, content
    included. On one node whoever asks for a word makes it. With several nodes it becomes what it is in the store of the
    rendezvous: who wants a word leaves a wish, our launcher carries it there and makes the link from what stands
    (`cluster.bus.Board`).

    Any process of the job, any thread. All methods raise OSError, and ValueError for a strange word.
    """

    def __init__(self, pages: Path, attempt: int) -> None:
        """Use the words in `pages`; our launcher has said there how many nodes the attempt has."""
        self._pages = pages
        self._attempt = attempt
        self.shared = _nodes(pages, attempt) > 1

    def decision(self, round_: int) -> StopDecision | None:
        """Return what was decided in a round, or None as long as nothing is."""
        found = read_link(word_path(self._pages, self._attempt, f"stop-{round_}"))
        return None if found is None else StopDecision(found)

    def proposal(self, round_: int) -> Proposal | None:
        """Return what was proposed in a round, or None as long as nothing is."""
        found = read_link(word_path(self._pages, self._attempt, f"plan-{round_}"))
        return None if found is None else Proposal(round_, int(found))

    def propose(self, proposal: Proposal) -> None:
        """Ask for a proposal; what stands then is what anybody asked for first."""
        self._ask(f"plan-{proposal.round}", str(proposal.at))

    def decide(self, round_: int, wanted: StopDecision) -> StopDecision | None:
        """See `DecisionCell`; with several nodes what stands is known a little later."""
        self._ask(f"stop-{round_}", wanted.value)
        return self.decision(round_)

    def decide_alone(self, round_: int) -> bool:
        """Decide for this node only, unless what was decided is known by now; return whether this did it."""
        return make_link(word_path(self._pages, self._attempt, f"stop-{round_}"), StopDecision.ALONE.value)

    def _ask(self, name: str, value: str) -> None:
        make = wish_path if self.shared else word_path
        make_link(make(self._pages, self._attempt, name), value)


class StoreCell:
    """The cell of ranks that agree by themselves: the store of their process group. Raises what the store raises."""

    def __init__(self, store: Any) -> None:
        """Use a store of the attempt's own."""
        self._store = store

    def decide(self, round_: int, wanted: StopDecision) -> StopDecision:
        """See `DecisionCell`."""
        return StopDecision(self._store.compare_set(f"decision/{round_}", "", wanted.value).decode())


def word_path(pages: Path, attempt: int, name: str) -> Path:
    """Return where a word stands once it does."""
    return pages / f"{WORD}{attempt}-{name}"


def wish_path(pages: Path, attempt: int, name: str) -> Path:
    """Return where a wish for a word is left for the launcher."""
    return pages / f"{WISH}{attempt}-{name}"


def make_link(path: Path, value: str) -> bool:
    """Write a word unless there is one; return whether it was this one. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.symlink(value, path)
        return True
    return False


def read_link(path: Path) -> str | None:
    """Return a word, or None as long as there is none. Raises OSError."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return None


def _nodes(pages: Path, attempt: int) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(read_bytes(pages / f"attempt-{attempt}.json"))["nodes"])
    return 1  # not started by our launcher
