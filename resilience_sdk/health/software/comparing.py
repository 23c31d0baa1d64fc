"""Whether all ranks run on the same: findings of several nodes or ranks, compared. Pure.

A finding that is to be equal everywhere says so itself: `data["same"]` holds values by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status

_MOST_NAMED = 8
_NOT_SET = "(not set)"
_REINSTALL = "install the same version everywhere: one image or environment on a shared file system for all nodes"


@attrs.frozen
class _Rule:
    """What a difference means, and its cure."""

    stops: bool
    cure: str


# Those that make ranks disagree about what goes over the wire, or about what a checkpoint holds.
_RULES = {
    "torch": _Rule(True, _REINSTALL),
    "cuda": _Rule(True, _REINSTALL),
    "nccl": _Rule(True, _REINSTALL),
    "resilience-sdk": _Rule(True, _REINSTALL),
    "python": _Rule(False, _REINSTALL),
}
_BY_CHECK = {
    "settings": _Rule(False, "give every node the same options, or one --config file for all"),
    "environment": _Rule(False, "export the same value on every node: in the batch script, not in a shell profile"),
    "packages": _Rule(False, _REINSTALL),
}
_OTHER = _Rule(False, "make the nodes equal, or leave the odd one out")


def compare(findings: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return a finding for each value that differs between the nodes or ranks, which are named by the keys.

    The odd ones are those that differ from more than half; where no value has that many, nobody is called odd.
    """
    values: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for who, told in findings.items():
        for finding in told:
            same = finding.data.get("same")
            if isinstance(same, Mapping):
                values.setdefault((finding.probe, finding.check), {})[who] = dict(same)
    found = []
    for (probe, check), by_who in values.items():
        for name in sorted({name for same in by_who.values() for name in same}):
            answers = {who: _text(same.get(name)) for who, same in by_who.items()}
            if len(set(answers.values())) > 1:
                found.append(_difference(probe, check, name, answers))
    return found


def _difference(probe: str, check: str, name: str, answers: Mapping[str, str]) -> Finding:
    counts = Counter(answers.values()).most_common()
    usual, times = counts[0]
    has_usual = 2 * times > len(answers)
    odd = [who for who, value in answers.items() if value != usual] if has_usual else []
    groups = [f"{value} on {_listed([who for who, own in answers.items() if own == value])}" for value, _ in counts]
    rule = _RULES.get(name) or _BY_CHECK.get(check) or _OTHER
    return Finding(
        probe=probe,
        check="same_everywhere",
        subject=name,
        status=Status.FAILED if rule.stops else Status.DEGRADED,
        value=len(counts),
        unit="different values",
        threshold=1,
        evidence="; ".join(groups),
        cure=rule.cure,
        must=rule.stops,
        data={"check": check, "odd": odd, "values": dict(answers)},
    )


def _text(value: Any) -> str:
    return _NOT_SET if value is None else str(value)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
