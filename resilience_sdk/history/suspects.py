"""Suspect nodes: a pure function of how often, and how long, each one was at work. Victims never count.

A node is suspect if it has failed more often than the other nodes' rate lets expect, in independent failures: Poisson
tails, with the rate of all other nodes and a prior of one failure at the rate that Meta saw (6.5 in 1,000 node-days;
Kokolis et al., HPCA 2025), and the false discovery rate held by Benjamini and Hochberg's procedure (1995) over all
nodes. So of the nodes that are named about one in fifty is named by chance, however many nodes there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from resilience_sdk.attribution.first_death import HEARSAY
from resilience_sdk.goodput.poisson import at_least

LEAST_FAILURES = 2
"""Independent failures below which no node is suspect."""
FALSE_DISCOVERIES = 0.02
SUSPECT_FOR_S = 28 * 86400.0
"""How far back is looked: what was repaired has its chance again."""
APART_S = 3600.0
"""Failures of one node in one run that are closer together are one: a restart that meets the same fault."""
TOGETHER_S = 600.0
"""Failures of one node in several runs that ran at that time are one if they are closer together: of one fault."""
_PRIOR_FAILURES = 1.0
_PRIOR_S = 86400.0 * 1000.0 / 6.5
_MOST_BLAMED = 0.5  # of a job's nodes: more than that are no culprits, or the fault is not a node's
_OF_USERS = frozenset({"user", "data", "checkpoint", "numerics"})
_OF_NOBODY = frozenset({"scheduler", "none"})
_UNKNOWN = "unknown"
_HARDWARE = "hardware"
_WAIT = "wait"  # the action where something outside of the nodes has to come back: storage, a service
_MOST_DIGITS = 9
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@attrs.frozen
class Failure:
    """One failure of a run. `nodes` are those of its culprits."""

    run: str
    incident: str
    at: float
    category: str
    cause: str
    action: str
    signature: str
    nodes: tuple[str, ...]
    of_nodes: int | None = None
    """How many nodes the job had."""
    world_size: int | None = None
    summary: str = ""
    recovery_s: float | None = None
    lost_steps: int | None = None
    began_at: float | None = None
    """Of the attempt in which it was."""
    confidence: float | None = None

    @property
    def blame(self) -> str:
        """Whose it is: `user` (the program, its data), `nobody` (a scheduler), `unknown`, else `infrastructure`."""
        if self.category in _OF_NOBODY:
            return "nobody"
        if self.category == _UNKNOWN:
            return _UNKNOWN
        return "user" if self.category in _OF_USERS or self.action == "stop" else "infrastructure"

    @property
    def blames_nodes(self) -> bool:
        """Whether it says anything about a node.

        Not where more than half of the job's nodes are named together, nor where the cause is not known (a program that
        leaves with 1 and no word), or outside of all nodes, nor where a program's words alone blame the hardware.
        """
        hearsay = self.category == _HARDWARE and self.confidence is not None and self.confidence <= HEARSAY
        few = self.of_nodes is None or self.of_nodes <= 1 or len(self.nodes) <= _MOST_BLAMED * self.of_nodes
        return self.blame == "infrastructure" and self.action != _WAIT and bool(self.nodes) and few and not hearsay


@attrs.frozen
class NodeRecord:
    """One node. `failures` are the independent ones of which it was the culprit, oldest first."""

    name: str
    worked_s: float
    runs: int
    failures: tuple[Failure, ...] = ()
    of_users: int = 0
    """Failures of users' programs on it, which say nothing about it."""
    chance: float = 1.0
    """Probability of so many failures, or more, if it were like the others."""
    suspect: bool = False

    @property
    def why(self) -> str:
        """The evidence in one sentence."""
        causes: dict[str, int] = {}
        for failure in self.failures:
            causes[failure.cause] = causes.get(failure.cause, 0) + 1
        told = ", ".join(f"{cause} ({count} times)" if count > 1 else cause for cause, count in causes.items())
        runs = len({failure.run for failure in self.failures})
        where = f"in {runs} runs" if runs > 1 else "in one run"
        count = len(self.failures)
        what = "1 failure" if count == 1 else f"{count} independent failures"
        return f"{what} {where}: {told}" if count else "no failure"


def judge_nodes(
    worked_s: Mapping[str, float],
    runs: Mapping[str, int],
    failures: Iterable[Failure],
    *,
    least: int = LEAST_FAILURES,
) -> list[NodeRecord]:
    """Return the record of each node, the least probable first.

    Args:
        worked_s: Seconds that each node was at work.
        runs: In how many runs each was.
        failures: All failures of that time, in any order.
        least: Independent failures that it takes.
    """
    of_node: dict[str, list[Failure]] = {}
    of_users: dict[str, int] = {}
    for failure in sorted(failures, key=lambda failure: (failure.at, failure.run, failure.incident)):
        for node in failure.nodes:
            if failure.blames_nodes:
                of_node.setdefault(node, []).append(failure)
            elif failure.blame == "user":
                of_users[node] = of_users.get(node, 0) + 1
    own = {node: independent(found) for node, found in of_node.items()}
    all_failures, all_s = sum(map(len, own.values())), sum(worked_s.values())
    records = []
    for node in sorted({*worked_s, *own, *of_users}):
        found, at_work_s = own.get(node, ()), worked_s.get(node, 0.0)
        others = (all_failures - len(found) + _PRIOR_FAILURES) / (max(0.0, all_s - at_work_s) + _PRIOR_S)
        chance = at_least(len(found), others * at_work_s) if found else 1.0
        records.append(
            NodeRecord(node, at_work_s, runs.get(node, 0), tuple(found), of_users.get(node, 0), chance)
        )  # fmt: skip
    records.sort(key=lambda record: (record.chance, -len(record.failures), record.name))
    named = _named(records, least)
    return [attrs.evolve(record, suspect=record.name in named) for record in records]


def _named(records: Sequence[NodeRecord], least: int) -> set[str]:
    """Return the nodes that Benjamini and Hochberg's procedure rejects, and that have failures enough."""
    last = 0
    for place, record in enumerate(records, 1):
        if record.failures and record.chance <= FALSE_DISCOVERIES * place / len(records):
            last = place
    return {record.name for record in records[:last] if len(record.failures) >= max(LEAST_FAILURES, least)}


def independent(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures of one node that do not follow from one another, or from one fault; `failures` by time."""
    kept: list[Failure] = []
    last: dict[str, float] = {}
    for failure in failures:
        if not _is_same_fault(failure, kept) and failure.at - last.get(failure.run, float("-inf")) >= APART_S:
            kept.append(failure)
        last[failure.run] = failure.at
    return tuple(kept)


def _is_same_fault(failure: Failure, kept: Sequence[Failure]) -> bool:
    """Tell whether a node had just failed in another run, while this one was there as well."""
    if not kept or failure.began_at is None:
        return False
    return failure.began_at <= kept[-1].at and failure.at - kept[-1].at < TOGETHER_S


@attrs.frozen
class Omen:
    """What a finding has been followed by so far, and where it stands now. `ahead_s`: within that time."""

    check: str
    node: str
    at: float
    right: int
    """Episodes on any node after which that node failed."""
    seen: int
    ahead_s: float
    evidence: str = ""

    @property
    def text(self) -> str:
        """The warning."""
        share = f"{self.right} of {self.seen} times"
        told = f" ({self.evidence})" if self.evidence else ""
        return f"node {self.node}: {self.check}{told}; a node with it failed within {self.ahead_s / 3600:.0f} h {share}"


AHEAD_S = 24 * 3600.0
_LEAST_EPISODES, _LEAST_RIGHT = 3, 0.5
_TIMES_BY_CHANCE = 3.0


def omens(
    findings: Iterable[tuple[str, str, float, str]],
    records: Iterable[NodeRecord],
    now: float,
    *,
    ahead_s: float = AHEAD_S,
) -> list[Omen]:
    """Return the findings of the last `ahead_s` seconds that, by the history, precede failures.

    Findings are `(check, node, at, evidence)`. One check on one node within `ahead_s` is one episode, which is right
    where the node failed within `ahead_s` after it; it takes three that are over, half of them right, and three times
    what chance gives.
    """
    failed = {record.name: [failure.at for failure in record.failures] for record in records}
    worked_s = sum(record.worked_s for record in records)
    by_chance = sum(map(len, failed.values())) / worked_s * ahead_s if worked_s else 0.0
    episodes: dict[str, list[tuple[str, float, str]]] = {}
    newest: dict[tuple[str, str], float] = {}
    for check, node, at, evidence in sorted(findings, key=lambda finding: finding[2]):
        if at - newest.get((check, node), float("-inf")) >= ahead_s:
            newest[check, node] = at
            episodes.setdefault(check, []).append((node, at, evidence))
    found = []
    for check, told in sorted(episodes.items()):
        right = [any(0 <= end - at <= ahead_s for end in failed.get(node, ())) for node, at, _ in told]
        over = [hit for hit, (_, at, _) in zip(right, told, strict=True) if hit or now - at > ahead_s]
        share = sum(over) / len(over) if over else 0.0
        if len(over) < _LEAST_EPISODES or share < max(_LEAST_RIGHT, _TIMES_BY_CHANCE * by_chance):
            continue
        for (node, at, evidence), hit in zip(told, right, strict=True):
            if not hit and 0 <= now - at <= ahead_s:
                found.append(Omen(check, node, at, sum(over), len(over), ahead_s, evidence))
    return found


def hostlist(names: Iterable[str]) -> str:
    """Return names in Slurm's form: `n[1,3-5],other`; numbers keep their leading zeros.

    What no node can be called is left out: names come from journals and databases that others may write.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in sorted({name for name in names if _NODE_NAME.fullmatch(name)}):
        head = name.rstrip("0123456789")
        if head == name or len(name) - len(head) > _MOST_DIGITS:
            plain.append(name)
        else:
            groups.setdefault((head, len(name) - len(head)), []).append(int(name[len(head) :]))
    told = list(plain)
    for (head, width), numbers in groups.items():
        parts = [f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in _runs(sorted(numbers))]
        told.append(f"{head}{numbers[0]:0{width}}" if len(numbers) == 1 else f"{head}[{','.join(parts)}]")
    return ",".join(sorted(told))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found
