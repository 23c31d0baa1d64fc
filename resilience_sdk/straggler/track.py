"""One section on the ranks of one role: its history, and what is found in it window by window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from resilience_sdk.straggler.common import Common, level_of, steps_of, work_of
from resilience_sdk.straggler.history import Evidence, Levels
from resilience_sdk.straggler.rules import Rules
from resilience_sdk.straggler.stalls import Stalls
from resilience_sdk.straggler.standing import EVERYBODY, NODE, RANK, STALL, Finding, Subject
from resilience_sdk.straggler.window import MOST_Z, NOT_SEEN, centres, levels_of, median, upper_centres
from resilience_sdk.straggler.workload import Points

_NOTHING_TOLD: Mapping[int, Sequence[float | None]] = {}
_MOST_OF_NODE = 0.75  # of the ranks of a node must be slow, for it to be the node


class Track:
    """The history of one section. Only ranks that do the same work may be given to one."""

    def __init__(self) -> None:
        """Begin without any history."""
        self._ranks: Levels[int] = Levels()
        self._nodes: Levels[str] = Levels()
        self._members: dict[str, list[int]] = {}
        self._common = Common()
        self._stalls = Stalls()

    def forget(self, rank: int) -> None:
        """Drop the history of a rank."""
        self._ranks.forget(rank)

    def level_of(self, subject: Subject) -> float:
        """Return how slow a subject was in the newest window, as a logarithm; NOT_SEEN if it was not there."""
        if subject.what == RANK:
            return self._ranks.newest(int(subject.name))
        if subject.what == NODE:
            return self._nodes.newest(subject.name)
        return self._common.newest if subject.what == EVERYBODY else NOT_SEEN

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Return the ranks that were seen on a node in the newest window."""
        return tuple(self._members.get(node, ()))

    def restart_common(self) -> None:
        """Forget how long the section took altogether: a regression has ended, so the mixture is no baseline."""
        self._common.restart()

    def add(
        self,
        rows: Mapping[int, Sequence[float]],
        node_of: Mapping[int, str],
        step_s: float,
        rules: Rules,
        of_ranks: int = 0,
        amounts: Mapping[int, Sequence[float | None]] = _NOTHING_TOLD,
    ) -> list[Finding]:
        """Take one window: rank -> one duration per pass in seconds, NOT_SEEN where there is none.

        `step_s` is the time of a whole step, `of_ranks` how many ranks the role has, `amounts` how much work each pass
        had on the ranks that have told it.
        """
        leveled = levels_of(rows, rules.few)
        self._ranks.add(leveled)
        self._members = _by_node(rows, node_of)
        if self._members:
            whole = {node: upper_centres([rows[rank] for rank in ranks]) for node, ranks in self._members.items()}
            self._nodes.add(levels_of(whole, rules.few))
        slow_ranks = self._ranks.slow(rules)
        slow_nodes = self._slow_nodes(leveled.levels, slow_ranks, rules)
        on_slow_nodes = {rank for node in slow_nodes for rank in self._members[node]}
        slow = slow_ranks.keys() | on_slow_nodes
        healthy = {rank: row for rank, row in rows.items() if rank not in slow} or rows
        steps = steps_of(list(healthy.values()), rules.few)
        common = level_of(steps)
        if common != common:
            return []
        findings = [
            Finding.of_level(Subject(NODE, node), self.ranks_of(node), evidence, _own_s(rows, self.ranks_of(node)))
            for node, evidence in slow_nodes.items()
        ]
        findings += [
            Finding.of_level(Subject(RANK, str(rank)), (rank,), evidence, _own_s(rows, (rank,)))
            for rank, evidence in slow_ranks.items()
            if rank not in on_slow_nodes
        ]
        findings += [
            Finding.of_stall(Subject(STALL, str(rank)), rank, stall, rules.z)
            for rank, stall in self._stalls.add(rows, _of_the_others(rows, rules), step_s, rules).items()
            if rank not in slow
        ]
        points = work_of(steps, healthy, amounts, rules.few) if amounts else ()
        return findings + self.add_common(common, tuple(rows), rules, of_ranks, points)

    def add_common(
        self, level: float, ranks: tuple[int, ...], rules: Rules, of_ranks: int = 0, points: Points = ()
    ) -> list[Finding]:
        """Take the logarithm of what `ranks` have in common in one window, and tell whether it has risen.

        `points` are the steps whose amount of work is known. What fewer than half of the role's ranks do, such as the
        one that saves, does not concern all of them.
        """
        if 2 * len(ranks) < of_ranks:
            return []
        self._common.add(level, points)
        few = len(ranks) < rules.few
        rise = self._common.rise()
        least = math.log1p(rules.excess_of_few if few else rules.regression)
        if rise is None or rise.z < rules.regression_z or rise.rise < least:
            return []
        return [
            Finding(
                subject=Subject(EVERYBODY, ""),
                ranks=ranks if len(ranks) == 1 else (),
                ratio=math.exp(rise.rise),
                excess_s=math.exp(rise.after) - math.exp(rise.before),
                z=min(MOST_Z, rise.z),
                needed_z=rules.regression_z,
                windows=self._common.windows - rise.index,
                bound=rise.middle,
                few=few,
            )
        ]

    def _slow_nodes(
        self, levels: Mapping[int, float], slow: Mapping[int, Evidence], rules: Rules
    ) -> dict[str, Evidence]:
        """Return the nodes of which most ranks are slow: each by itself, or all of them as much as the node is."""
        by_node = self._nodes.slow(rules) if self._members else {}
        found: dict[str, Evidence] = {}
        for node, ranks in self._members.items():
            evidence = by_node.get(node)
            if evidence is not None:
                others = [value for rank, value in levels.items() if rank not in ranks and value == value]
                bound = (median(others) if others else 0.0) + 0.5 * evidence.excess
                late = sum(levels[rank] >= bound for rank in ranks)
            else:
                of_ranks = sorted((slow[rank] for rank in ranks if rank in slow), key=lambda of_rank: of_rank.excess)
                late = len(of_ranks)
                evidence = of_ranks[late // 2] if late else None
            if evidence is not None and late > 1 and late >= _MOST_OF_NODE * len(ranks):
                found[node] = evidence
        return found


def _of_the_others(rows: Mapping[int, Sequence[float]], rules: Rules) -> list[float]:
    """Return what each pass takes who does not stall in it: the median rank; of two ranks, the faster one.

    Half way between two, the longest stall would not be three times as long.
    """
    return centres(rows.values()) if len(rows) > 2 else steps_of(list(rows.values()), rules.few)


def _own_s(rows: Mapping[int, Sequence[float]], ranks: Sequence[int]) -> float:
    """Return how long a pass takes on some ranks: the median of all of theirs, in seconds."""
    known = [value for rank in ranks for value in rows[rank] if value == value]
    return median(known) if known else 0.0


def _by_node(rows: Mapping[int, Sequence[float]], node_of: Mapping[int, str]) -> dict[str, list[int]]:
    """Return node -> its ranks, where nodes can be told from ranks: at least two nodes, of at least two ranks each."""
    members: dict[str, list[int]] = {}
    for rank in rows:
        members.setdefault(node_of[rank], []).append(rank)
    members = {node: sorted(ranks) for node, ranks in members.items() if len(ranks) > 1}
    return members if len(members) > 1 else {}
