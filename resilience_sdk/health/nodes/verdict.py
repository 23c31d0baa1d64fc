"""What reports and trials of all nodes mean for the job: findings, and which nodes to leave out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.nodes.pairing import (
    SLOW,
    Standing,
    Trial,
    judge,
    usual_rates,
    usual_seconds,
)
from resilience_sdk.health.software.comparing import compare
from resilience_sdk.health.watching import to_event

PROBE = "nodes"
_MOST_NAMED = 8
_CHECK_NODE = "have this node checked: its links (`ethtool`, `ibstat`), `dmesg -T`, what else runs on it"
_CHECK_WAY = (
    "choose the interface between the nodes with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, and open the ports between "
    "them (firewall)"
)


@attrs.frozen
class Refusal:
    """Why the preflight of one node alone stands against the job.

    `of_the_node` where it is known to be a fault of that node; else it may be the same on all.
    """

    reason: str
    of_the_node: bool


@attrs.frozen
class Report:
    """What one node brings: the findings that are to be equal everywhere, and what it refuses."""

    findings: Sequence[Finding] = ()
    refusal: Refusal | None = None
    devices: Sequence[str] = ()
    holds_store: bool = False


@attrs.frozen
class Verdict:
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
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "events": [to_event(finding) for finding in self.findings],
            "leave_out": {str(node): why for node, why in self.leave_out.items()},
            "unnamed": self.unnamed,
            "stop": self.stop,
        }


def from_reports(names: Sequence[str], reports: Mapping[int, Report]) -> Verdict:
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
    return Verdict([*findings, *differences], leave_out, stop="; ".join(stops))


def from_trials(names: Sequence[str], nodes: Sequence[int], silent: Sequence[int], trials: Sequence[Trial]) -> Verdict:
    """Return what follows from the trials of `nodes`; those that are `silent` stopped to answer meanwhile."""
    standing = judge(nodes, trials)
    usual = usual_seconds(trials)
    findings = [_silent(names[node]) for node in silent]
    leave_out = dict.fromkeys(silent, "it stopped to answer")
    for node in sorted(standing.bad):
        finding = _of_node(node, names, standing, trials, usual)
        findings.append(finding)
        leave_out[node] = finding.evidence
    unnamed, stop = "", ""
    for pair in standing.ways:
        finding = _of_way(pair, names, trials)
        findings.append(finding)
        unnamed = f"{finding.subject}: {finding.evidence}"
    unsure = sorted(standing.open & {node for trial in trials if trial.seconds is None for node in trial.pair})
    if unsure:
        finding = _of_unsure(unsure, names, trials)
        findings.append(finding)
        text = f"{finding.evidence} ({finding.subject})"
        everybody = not standing.cleared and len(unsure) > 2
        unnamed, stop = ("", text) if everybody else (text, "")
    return Verdict(findings, leave_out, unnamed=unnamed, stop=stop)


def together(before: Verdict, after: Verdict) -> Verdict:
    """Return what follows from both, from the reports and from the trials."""
    return Verdict(
        findings=[*before.findings, *after.findings],
        leave_out={**before.leave_out, **after.leave_out},
        unnamed=after.unnamed,
        stop="; ".join(filter(None, (before.stop, after.stop))),
    )


def _of_node(
    node: int, names: Sequence[str], standing: Standing, trials: Sequence[Trial], usual: Mapping[tuple[str, ...], float]
) -> Finding:
    """Return what is wrong with a node that is named."""
    own = [trial for trial in trials if node in trial.pair]
    partners = _listed([names[other] for trial in own for other in trial.pair if other != node])
    if node in standing.failing:
        why = next(trial.why for trial in own if trial.seconds is None)
        evidence = f"no all_reduce with {partners} came about, others reduce with one another: {why}"
        return _finding("all_reduce", names[node], Status.FAILED, evidence)
    if node in standing.computes_slowly:  # its reductions may be slow for that
        rates = [
            (trial.rates[node], usual_rates(trials, trial.round)[model], model)
            for trial in own
            if node in trial.rates
            for model in [trial.models.get(node, "")]
        ]
        rate, others, model = max(rates)
        alike = f"others of its model ({model})" if model else "others"
        evidence = f"computes {rate:.3g} products a second, {alike} {others:.3g}"
        return _finding("compute_speed", names[node], Status.FAILED, evidence, rate, "products/s", others / SLOW)
    took, least = min((trial.seconds, usual[trial.kind]) for trial in own if trial.seconds is not None)
    evidence = f"an all_reduce takes {_time(took)} with {partners}, {_time(least)} among others"
    return _finding("all_reduce_speed", names[node], Status.FAILED, evidence, took, "s", SLOW * least)


def _of_way(pair: tuple[int, int], names: Sequence[str], trials: Sequence[Trial]) -> Finding:
    why = next(trial.why for trial in trials if trial.pair == pair and trial.seconds is None)
    return _finding(
        "all_reduce",
        f"{names[pair[0]]} and {names[pair[1]]}",
        Status.FAILED,
        f"no all_reduce with one another came about, each reduces with others: {why}",
        cure=f"look at what lies between the two (switch, route, firewall); {_CHECK_WAY}",
    )


def _of_unsure(unsure: Sequence[int], names: Sequence[str], trials: Sequence[Trial]) -> Finding:
    why = next(trial.why for trial in trials if trial.seconds is None and set(trial.pair) & set(unsure))
    listed = _listed([names[node] for node in unsure])
    two = len(unsure) == 2
    which = "one of these two is the reason, which one cannot be told" if two else "no all_reduce between any of these"
    return _finding("all_reduce", listed, Status.FAILED, f"{which}: {why}", cure=f"{_CHECK_WAY}; {_CHECK_NODE}")


def _silent(name: str) -> Finding:
    return _finding("answers", name, Status.FAILED, "it came to the rendezvous and then did not answer")


def _finding(
    check: str,
    subject: str,
    status: Status,
    evidence: str,
    value: float | None = None,
    unit: str = "",
    threshold: float | None = None,
    cure: str = _CHECK_NODE,
) -> Finding:
    return Finding(
        probe=PROBE,
        check=check,
        subject=subject,
        status=status,
        value=value,
        unit=unit,
        threshold=threshold,
        evidence=evidence,
        cure=cure,
        must=True,
    )


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    if len(names) > _MOST_NAMED:
        return ", ".join(names[:_MOST_NAMED]) + f" and {len(names) - _MOST_NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
