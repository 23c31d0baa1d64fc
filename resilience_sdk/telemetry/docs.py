"""The table in `docs/telemetry.md`, made from the families: `python -m resilience_sdk.telemetry.docs FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from resilience_sdk.generated import rewrite
from resilience_sdk.telemetry.families import FAMILIES

BEGIN, END = "<!-- metrics: generated -->", "<!-- metrics: end -->"


def metrics_table() -> str:
    """Return the generated part of the page: a row per metric."""
    rows = [
        f"| `{family.prometheus_name}` | `{family.otel_name}` | {family.kind} "
        f"| {', '.join(f'`{label}`' for label in family.labels)} | {family.about} |"
        for family in FAMILIES.values()
    ]
    head = ["| Prometheus | OpenTelemetry | kind | labels | meaning |", "|---|---|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), metrics_table())
