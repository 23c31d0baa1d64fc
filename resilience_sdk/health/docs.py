"""The table of GPU checks in `docs/health.md`, made from the rules: `python -m resilience_sdk.health.docs FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from resilience_sdk.generated import cell, rewrite
from resilience_sdk.health.gpu.rules import RULES, Rule

BEGIN, END = "<!-- gpu checks: generated -->", "<!-- gpu checks: end -->"


def gpu_table() -> str:
    """Return the generated part of the page: a row per check."""
    rows = [
        f"| `{rule.check}`{' (must)' if rule.must else ''} | {cell(rule.looks_at)} | {_limit(rule)} "
        f"| {cell(rule.cure)} | {cell(rule.source)} |"
        for rule in RULES.values()
    ]
    return "\n".join(
        [BEGIN, "", "| check | looks at | limit | cure | source |", "|---|---|---|---|---|", *rows, "", END]
    )


def _limit(rule: Rule) -> str:
    parts = []
    if rule.limit is not None:
        parts.append(f"{rule.limit:g} {rule.unit}".strip())
    if rule.growth_per_minute is not None:
        growth = "any growth" if rule.growth_per_minute == 0 else f"more than {rule.growth_per_minute:g} a minute"
        parts.append(f"{growth} during a run")
    return ", ".join(parts) or "the driver's own"


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), gpu_table())
