"""The verdict over reports and trials of all nodes: findings, and which nodes the job should leave out. Pure.

The first round pairs neighbours. A pair that goes well clears both its nodes; one that fails, or is slow, makes two
suspects. The second round pairs each suspect with a node that is cleared: who goes well now was only beside the bad
one. The idea is that of DLRover's node check. Further rounds come only where the second leaves something open: three
nodes (all three pairs are tried), an odd one out, more suspects than cleared nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import attrs

from resilience_sdk.core.json_records import to_values
from resilience_sdk.health.findings import Finding, Status, compare, listed, to_event
from resilience_sdk.health.probes import NODES

SLOW = 2.0  # times what others need: links and clocks of sound nodes differ by less, so DLRover's ratio
# Beyond what others need. gloo: on a busy machine a sound pair was seen 11 ms above another. NCCL moves its 256 MiB
# within milliseconds and by no processor, so that all of half a link's speed would hide in as much.
MIN_EXTRA_S = {"gloo": 0.05, "nccl": 0.002}
MAX_ROUNDS = 6
_TIMES = 2  # a node is named when it went wrong so often, and never well

Pair = tuple[int, int]


@attrs.frozen
class Trial:
    """What came of a pair. Nodes are numbers.

    `seconds` is what one reduction took, None where none came about (`why` then says what happened). `rates` holds,
    by node, how many products of two matrices it computed per second, of its slowest device, and `models` what that
    device is.
    """

    round: int
    pair: Pair
    seconds: float | None
    why: str = ""
    rates: Mapping[int, float] = attrs.field(factory=dict)
    models: Mapping[int, str] = attrs.field(factory=dict)
    backend: str = "gloo"

    @property
    def kind(self) -> tuple[str, ...]:
        """Which reductions take as long: those by the same backend, and of GPUs those among the same models."""
        models = () if self.backend == "gloo" else sorted(self.models.get(node, "") for node in self.pair)
        return (self.backend, *models)


@attrs.frozen
class TrialStanding:
    """What the trials say of each node.

    `cleared`: went well in a pair. `failing`, `slow`: their reductions fail or are slow with whomever, among them
    nodes that are cleared. `computes_slowly`: in each round in which they took part. `open`: none of these.
    `ways`: pairs that failed though both nodes are cleared.
    """

    cleared: frozenset[int]
    failing: frozenset[int]
    slow: frozenset[int]
    computes_slowly: frozenset[int]
    open: frozenset[int]
    ways: tuple[Pair, ...]

    @property
    def bad(self) -> frozenset[int]:
        """All that should be left out."""
        return self.failing | self.slow | self.computes_slowly


def usual_seconds(trials: Iterable[Trial]) -> dict[tuple[str, ...], float]:
    """Return, by kind, what a reduction takes among sound nodes: the lower quartile, which few bad ones do not move."""
    taken: dict[tuple[str, ...], list[float]] = {}
    for trial in trials:
        if trial.seconds is not None:
            taken.setdefault(trial.kind, []).append(trial.seconds)
    return {kind: sorted(values)[(len(values) - 1) // 4] for kind, values in taken.items()}


def usual_rates(trials: Iterable[Trial], round_: int) -> dict[str, float]:
    """Return, by model, how many products a sound node computes per second in a round: the upper quartile."""
    rates: dict[str, list[float]] = {}
    for trial in trials:
        if trial.round == round_:
            for node, rate in trial.rates.items():
                rates.setdefault(trial.models.get(node, ""), []).append(rate)
    return {model: sorted(values, reverse=True)[(len(values) - 1) // 4] for model, values in rates.items()}


def is_slow(trial: Trial, usual: Mapping[tuple[str, ...], float]) -> bool:
    """Tell whether a reduction took much longer than others of its kind do."""
    least = usual.get(trial.kind)
    if trial.seconds is None or least is None:
        return False
    return trial.seconds > max(SLOW * least, least + MIN_EXTRA_S[trial.backend])


def judge(nodes: Iterable[int], trials: Sequence[Trial]) -> TrialStanding:
    """Return what is known of the nodes after these trials."""
    usual, everybody = usual_seconds(trials), frozenset(nodes)
    went_wrong = [trial for trial in trials if trial.seconds is None or is_slow(trial, usual)]
    cleared = frozenset(node for trial in trials if trial not in went_wrong for node in trial.pair)
    failing: set[int] = set()
    slow: set[int] = set()
    for node in everybody - cleared:
        partners = {_other(trial.pair, node): trial for trial in went_wrong if node in trial.pair}
        telling = [trial for partner, trial in partners.items() if partner in cleared]
        if len(partners) >= _TIMES and telling:
            (failing if any(trial.seconds is None for trial in telling) else slow).add(node)
    slowly = frozenset(node for node, times in _slow_rounds(trials).items() if times >= _TIMES) & everybody
    named = failing | slow | slowly
    return TrialStanding(
        cleared=cleared - named,
        failing=frozenset(failing),
        slow=frozenset(slow),
        computes_slowly=slowly,
        open=everybody - cleared - named,
        ways=tuple(trial.pair for trial in went_wrong if trial.seconds is None and cleared.issuperset(trial.pair)),
    )


def next_pairs(nodes: Iterable[int], trials: Sequence[Trial]) -> tuple[Pair, ...]:
    """Return who tries with whom in the next round; nothing where all is known, or no more can be."""
    everybody = sorted(nodes)
    if not trials:
        return tuple(zip(everybody[::2], everybody[1::2], strict=False))
    if max(trial.round for trial in trials) + 1 >= MAX_ROUNDS:
        return ()
    standing, tried = judge(everybody, trials), {trial.pair for trial in trials}
    again = {node for node, times in _slow_rounds(trials).items() if times < _TIMES}
    if len(everybody) <= 3:  # nobody else is there to compare with
        pairs = list(itertools.combinations(everybody, 2))
        untried = [pair for pair in pairs if pair not in tried]
        return tuple(untried or [pair for pair in pairs if again.intersection(pair)])[:1]
    wanting = sorted(again | standing.open)
    return _matched(wanting, sorted(standing.cleared - again), tried) or _matched(wanting, wanting, tried)


def _matched(wanting: Sequence[int], partners: Sequence[int], tried: Set[Pair]) -> tuple[Pair, ...]:
    """Give each node that wants one a partner of its own with which it was not tried yet, as far as there are any."""
    pairs: list[Pair] = []
    taken: set[int] = set()
    for node in wanting:
        free = (other for other in partners if other not in taken and other != node and node not in taken)
        partner = next((other for other in free if _pair(node, other) not in tried), None)
        if partner is not None:
            pairs.append(_pair(node, partner))
            taken |= {node, partner}
    return tuple(pairs)


def _slow_rounds(trials: Sequence[Trial]) -> dict[int, int]:
    """Return, for each node that computed slowly in every round it took part in, in how many."""
    usual = {round_: usual_rates(trials, round_) for round_ in {trial.round for trial in trials}}
    marks: dict[int, list[bool]] = {}
    for trial in trials:
        for node, rate in trial.rates.items():
            marks.setdefault(node, []).append(rate * SLOW < usual[trial.round][trial.models.get(node, "")])
    return {node: len(slow) for node, slow in marks.items() if all(slow)}


def _pair(node: int, other: int) -> Pair:
    return min(node, other), max(node, other)


def _other(pair: Pair, node: int) -> int:
    return pair[1] if pair[0] == node else pair[0]


@attrs.frozen
class Refusal:
    """Why the preflight of one node alone stands against the job.

    `of_the_node` where it is known to be a fault of that node; else it may be the same on all.
    """

    reason: str
    of_the_node: bool


@attrs.frozen
class NodeReport:
    """What one node brings: the findings that are to be equal everywhere, and what it refuses."""

    findings: Sequence[Finding] = ()
    refusal: Refusal | None = None
    devices: Sequence[str] = ()
    holds_store: bool = False


@attrs.frozen
class NodesVerdict:
    """What follows. Nodes are numbers.

    `leave_out` says why, by node. `unnamed`: why the job cannot start although nobody can be named; `stop`: what has
    to be cured first, as it would be the same on other nodes. Both are empty where there is nothing.
    """

    findings: Sequence[Finding] = ()
    leave_out: Mapping[int, str] = attrs.field(factory=dict)
    unnamed: str = ""
    stop: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, with the events that tell the journal of the findings."""
        return {**to_values(self), "events": [to_event(finding) for finding in self.findings]}


def from_reports(names: Sequence[str], reports: Mapping[int, NodeReport]) -> NodesVerdict:
    """Return what follows from what the nodes brought. A node without a report is left out.

    Versions are compared among the nodes that stay: one that leaves for something else takes its own with it.
    """
    findings = [_silent(name) for node, name in enumerate(names) if node not in reports]
    leave_out = {node: "it says nothing" for node in range(len(names)) if node not in reports}
    refusals = {node: report.refusal for node, report in sorted(reports.items()) if report.refusal is not None}
    # What another node would not cure, as far as one node can tell: it is so where most have it.
    same = [node for node, refusal in refusals.items() if not refusal.of_the_node]
    everywhere = same if 2 * len(same) > len(reports) else []
    stops = [f"{names[node]}: {refusals[node].reason}" for node in everywhere]
    leave_out |= {node: refusal.reason for node, refusal in refusals.items() if node not in everywhere}
    staying = {names[node]: report.findings for node, report in reports.items() if node not in leave_out}
    differences = compare(staying)
    for difference in differences:
        odd = [node for node, name in enumerate(names) if name in difference.data["odd"]]
        what = f"{difference.subject} ({difference.evidence})"
        if difference.stops and not odd:
            stops.append(f"no more than half of the nodes have the same {what}; {difference.cure}")
        if difference.stops:
            leave_out |= {node: f"another version than most of {what}" for node in odd}
    return NodesVerdict([*findings, *differences], leave_out, stop="; ".join(stops))


def from_trials(
    names: Sequence[str], nodes: Sequence[int], silent: Sequence[int], trials: Sequence[Trial]
) -> NodesVerdict:
    """Return what follows from the trials of `nodes`; those that are `silent` stopped to answer meanwhile."""
    standing = judge(nodes, trials)
    findings = [_silent(names[node]) for node in silent]
    leave_out = dict.fromkeys(silent, "it stopped to answer")
    for node in sorted(standing.bad):
        finding = _of_node(node, names, standing, trials)
        findings.append(finding)
        leave_out[node] = finding.evidence
    unnamed, stop = "", ""
    failed = [trial for trial in trials if trial.seconds is None]
    for pair in standing.ways:
        why = next(trial.why for trial in failed if trial.pair == pair)
        evidence = f"no all_reduce with one another came about, each reduces with others: {why}"
        cure = f"look at what lies between the two (switch, route, firewall); {_CHECK_WAY}"
        subject = listed(names[node] for node in pair)
        findings.append(NODES.found("all_reduce", Status.FAILED, evidence, subject=subject, cure=cure))
        unnamed = f"{subject}: {evidence}"
    if unsure := sorted(standing.open & {node for trial in failed for node in trial.pair}):
        why = next(trial.why for trial in failed if set(trial.pair) & set(unsure))
        which = "no all_reduce between any of these"
        if len(unsure) == 2:
            which = "one of these two is the reason, which one cannot be told"
        subject, evidence = listed(names[node] for node in unsure), f"{which}: {why}"
        cure = f"{_CHECK_WAY}; {NODES.checks['all_reduce'].cure}"
        findings.append(NODES.found("all_reduce", Status.FAILED, evidence, subject=subject, cure=cure))
        if standing.cleared or len(unsure) <= 2:
            unnamed = f"{evidence} ({subject})"
        else:
            unnamed, stop = "", f"{evidence} ({subject})"
    return NodesVerdict(findings, leave_out, unnamed=unnamed, stop=stop)


_CHECK_WAY = (
    "choose the interface between the nodes with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, and open the ports between "
    "them (firewall)"
)


def together(before: NodesVerdict, after: NodesVerdict) -> NodesVerdict:
    """Return what follows from both, from the reports and from the trials."""
    return NodesVerdict(
        findings=[*before.findings, *after.findings],
        leave_out={**before.leave_out, **after.leave_out},
        unnamed=after.unnamed,
        stop="; ".join(filter(None, (before.stop, after.stop))),
    )


def _of_node(node: int, names: Sequence[str], standing: TrialStanding, trials: Sequence[Trial]) -> Finding:
    """Return what is wrong with a node that is named."""
    own = [trial for trial in trials if node in trial.pair]
    partners = listed(names[_other(trial.pair, node)] for trial in own)
    if node in standing.failing:
        why = next(trial.why for trial in own if trial.seconds is None)
        evidence = f"no all_reduce with {partners} came about, others reduce with one another: {why}"
        return NODES.found("all_reduce", Status.FAILED, evidence, subject=names[node])
    if node in standing.computes_slowly:  # its reductions may be slow for that
        rates = []
        for trial in own:
            if node in trial.rates:
                model = trial.models.get(node, "")
                rates.append((trial.rates[node], usual_rates(trials, trial.round)[model], model))
        rate, others, model = max(rates)
        alike = f"others of its model ({model})" if model else "others"
        evidence, limit = f"computes {rate:.3g} products a second, {alike} {others:.3g}", others / SLOW
        return NODES.found("compute_speed", Status.FAILED, evidence, rate, subject=names[node], limit=limit)
    usual = usual_seconds(trials)
    took, least = min((trial.seconds, usual[trial.kind]) for trial in own if trial.seconds is not None)
    evidence, limit = f"an all_reduce takes {_time(took)} with {partners}, {_time(least)} among others", SLOW * least
    return NODES.found("all_reduce_speed", Status.FAILED, evidence, took, subject=names[node], limit=limit)


def _silent(name: str) -> Finding:
    return NODES.found("answers", Status.FAILED, "it came to the rendezvous and then did not answer", subject=name)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
