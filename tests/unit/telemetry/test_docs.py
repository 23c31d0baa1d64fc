"""What ships beside the code speaks of metrics that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from resilience_sdk.telemetry.__main__ import provided_files
from resilience_sdk.telemetry.metrics import FAMILIES

PROVIDED = {path.name: path for path in provided_files()}


def known() -> set[str]:
    """Return every name that a scrape may have."""
    names = set()
    for family in FAMILIES.values():
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        names |= {family.prometheus_name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml", "alerts_test.yml"])
def test_every_metric_that_is_asked_for_exists(file: str) -> None:
    """A renamed metric must not leave an empty panel, or an alert that never comes."""
    used = set(re.findall(r"resilience_[a-z_]+", PROVIDED[file].read_text()))
    assert used
    assert used <= known()


def test_the_dashboard_is_one() -> None:
    """Panels with ids of their own, which do not overlap, and ask by run and node."""
    dashboard: dict[str, Any] = json.loads(PROVIDED["grafana.json"].read_text())
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
