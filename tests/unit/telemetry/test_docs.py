"""What ships beside the code speaks of metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from resilience_sdk.telemetry.families import FAMILIES

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "telemetry/grafana.json"


def known() -> set[str]:
    """Return every name that a scrape may have."""
    names = set()
    for family in FAMILIES.values():
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        names |= {family.prometheus_name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("file", ["telemetry/grafana.json", "telemetry/alerts.yml", "telemetry/alerts_test.yml"])
def test_every_metric_that_is_asked_for_exists(file: str) -> None:
    """A renamed metric must not leave an empty panel, or an alert that never comes."""
    used = set(re.findall(r"resilience_[a-z_]+", (DOCS / file).read_text()))
    assert used
    assert used <= known()


def test_the_dashboard_is_one() -> None:
    """Panels with ids of their own, which do not overlap, and ask by run and node."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for at in (panel["gridPos"],)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert all('run=~"$run",node=~"$node"' in query for query in queries)
    assert all(panel["description"].endswith(".") for panel in panels if panel["type"] != "row")
