"""How all ranks of a node stop at one check, without a collective and whatever the order of memory.

The unit is the number of `check()` calls since the start of the rank, equal on all ranks between collectives. The
coordinator (the node's monitor) proposes that all stop at check N = highest published count + a lead. A rank
acknowledges a proposal that it sees in time (count <= N). At count N it reads a write-once decision: COMMIT stops,
VOID goes on, and when there is none after a short wait, the rank writes VOID itself and obeys whoever was first. The
coordinator writes COMMIT only after *every* rank has acknowledged. So the absence of a message never means anything,
no order between two stores is assumed, and neither a late rank nor the death of the coordinator blocks anybody for
longer than the wait. Pure functions; `tests/unit/preemption/test_protocol.py` explores all interleavings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import attrs

_AT_BITS = 48
_MOST_ROUNDS = (1 << 16) - 2
_LEAD_S = 0.2  # of checks: what the coordinator may need between reading the counts and being read
_LEAST_LEAD = 2
_MOST_LEAD = 1 << 24

TEARDOWN = (1 << 64) - 1
"""The control word of an attempt that failed: who was asked to leave did not get a preemption."""


class Decision(str, Enum):
    """What a round came to; written once."""

    COMMIT = "commit"
    VOID = "void"


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
    proposal: Proposal | None, decision: Decision | None, ranks: Sequence[RankView]
) -> CoordinatorMove:
    """Return what the coordinator does about its open `proposal`, None = none is open."""
    if proposal is None or decision is Decision.VOID:
        return CoordinatorMove.PROPOSE
    if decision is Decision.COMMIT:
        return CoordinatorMove.STOPPED
    if all(rank.acknowledged == proposal.round for rank in ranks):
        return CoordinatorMove.COMMIT
    if any(rank.count > proposal.at for rank in ranks):
        return CoordinatorMove.VOID
    return CoordinatorMove.WAIT


def next_proposal(last_round: int, counts: Sequence[int], lead: int) -> Proposal | None:
    """Return the next round's proposal, `lead` checks ahead of the fastest rank; None when rounds are used up."""
    return Proposal(last_round + 1, max(counts) + lead) if last_round < _MOST_ROUNDS else None


def first_lead(checks_per_s: float) -> int:
    """Return the lead of the first round from the measured rate of checks."""
    return min(_MOST_LEAD, _LEAST_LEAD + math.ceil(_LEAD_S * max(0.0, checks_per_s)))


def next_lead(lead: int) -> int:
    """Return the lead of the round after one that was void."""
    return min(_MOST_LEAD, 2 * lead)
