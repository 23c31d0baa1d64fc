"""The kinds of faults, what each must lead to, and how an episode draws them. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

RANKS = 2
_LEAST, _MOST = 2, 12  # steps from the effect of one fault to the next fault
_AGREED_WITHIN = 40  # steps until a stop is agreed on a busy machine
_SAVED_WITHIN = 15  # steps until the next save, and it is over
_REPLACED_WITHIN = 80  # steps until another monitor is in charge
_COMPARED_WITHIN = 60  # steps until two windows of eight were compared
SLOW_S = 0.08  # in each step: several times what a step takes


@attrs.frozen
class Kind:
    """One way in which a training is disturbed, and what the SDK owes its user afterwards."""

    incident: str | None
    """The kind of its incident; None: it must make none."""
    causes: frozenset[str] = frozenset()
    """Of which the incident's cause is one; empty: any."""
    names_rank: bool = True
    """The incident's only culprit is the rank that was struck."""
    plan: str | None = None
    """How `RESILIENCE_FAULT` writes it; None: it is struck from outside."""
    ends: str = "attempt"
    """What is over after it: `nothing`, `attempt` (the launcher starts another one) or `job`."""
    told_by: str | None = None
    """The event that tells of it, where it makes no incident."""
    only_rank: int | None = None
    """The only rank that it can strike."""
    needs_network: bool = False
    """Its ranks are on two hosts."""
    settles: int = 0
    """How many steps may be done until its effect is over, so that the next fault is not part of it."""


def _crash(plan: str | None, *causes: str) -> Kind:
    return Kind("crash", frozenset(causes), plan=plan)


def _hang(how: str, *causes: str) -> Kind:
    return Kind("hang", frozenset(causes), plan=f"hang:how={how}")


_LEAVE: Mapping[str, Any] = {
    "names_rank": False,
    "ends": "job",
    "causes": frozenset({"preemption_sigterm"}),
    "settles": _AGREED_WITHIN,
}

KINDS: Mapping[str, Kind] = {
    "sigkill": _crash(None, "rank_killed_sigkill"),
    "sigkill in a step": _crash("kill:how=sigkill", "rank_killed_sigkill"),
    "segmentation fault": _crash("kill:how=segv"),
    "abort": _crash("kill:how=abort"),
    "exit code": _crash("kill:how=exit,code=3"),
    "exception": _crash("kill:how=exception", "user_code_error"),
    "sleeps": _hang("sleep", "hang_rank_stuck"),
    "blocked in C": _hang("c", "hang_rank_stuck"),
    "holds the GIL": _hang("gil", "hang_rank_stuck"),
    "stopped": _hang("stop", "hang_rank_stopped"),
    "stopped from outside": Kind("hang", frozenset({"hang_rank_stopped"})),
    "torn checkpoint": _crash(None, "rank_killed_sigkill"),
    "rank asked to leave": Kind("preemption", plan="preempt", **_LEAVE),
    "job asked to leave": Kind("preemption", **_LEAVE),
    "launcher killed": Kind(None, names_rank=False, ends="job"),
    "monitor killed": Kind(
        None, names_rank=False, ends="nothing", told_by="monitor_replaced", settles=_REPLACED_WITHIN
    ),
    "disk full": Kind(
        None,
        names_rank=False,
        plan="disk-full",
        ends="nothing",
        told_by="ckpt_fail",
        only_rank=0,  # which writes what all ranks have alike
        settles=_SAVED_WITHIN,
    ),
    "pause": Kind(None, names_rank=False, ends="nothing", settles=_AGREED_WITHIN),
    "slow": Kind(
        None,
        plan=f"slow:section=bwd,seconds={SLOW_S}",
        ends="nothing",
        settles=_COMPARED_WITHIN,
    ),
    "bad number": Kind("numerics", frozenset({"nan_loss"}), plan="nan"),
    "link cut": Kind("hang", frozenset({"network_partition"}), names_rank=False, needs_network=True),
}

NOT_TWICE = frozenset({"exception", "slow"})
"""Those that are not drawn where one of them has just struck."""


@attrs.frozen
class Fault:
    """One fault: what happens to which rank as soon as it is at a step."""

    kind: str
    rank: int
    step: int

    @property
    def owes(self) -> Kind:
        """What must come of it."""
        return KINDS[self.kind]

    def plan(self, attempt: int) -> str | None:
        """Return it for `RESILIENCE_FAULT`; None where it is struck from outside."""
        if self.owes.plan is None:
            return None
        first = "," if ":" in self.owes.plan else ":"
        return f"{self.owes.plan}{first}rank={self.rank},step={self.step},attempt={attempt}"


def draw(rng: random.Random, number: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Fault]:
    """Return so many faults in the order in which they strike, of kinds that are equally likely."""
    found: list[Fault] = []
    step = 0
    is_slow = False
    while len(found) < number:
        kind = rng.choice(kinds)
        # The same exception twice in a row is a bug of the program, and rightly ends the job.
        if found and kind == found[-1].kind == "exception":
            continue
        # A slow rank stays slow to the end of its attempt, and beside another one it would not be slow.
        is_slow = is_slow and found[-1].owes.ends == "nothing"
        if is_slow and kind == "slow":
            continue
        is_slow = is_slow or kind == "slow"
        step += rng.randint(_LEAST, _MOST) + (found[-1].owes.settles if found else 0)
        rank = rng.randrange(RANKS)
        found.append(Fault(kind, rank if (only := KINDS[kind].only_rank) is None else only, step))
    return found


def jobs(faults: Sequence[Fault]) -> list[list[list[Fault]]]:
    """Return the faults by job, and in it by attempt: a fault that ends something is the last of its group.

    The last job is one that nothing ends; it may be without a fault.
    """
    told: list[list[list[Fault]]] = [[[]]]
    for fault in faults:
        told[-1][-1].append(fault)
        if fault.owes.ends == "job":
            told.append([[]])
        elif fault.owes.ends == "attempt":
            told[-1].append([])
    return told


def most_steps(number: int) -> int:
    """Return by which step so many faults have struck, whatever is drawn."""
    return number * _MOST + (number - 1) * max(kind.settles for kind in KINDS.values())
