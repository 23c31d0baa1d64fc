"""The table of metrics keeps the conventions of both worlds."""

from __future__ import annotations

import re

import pytest

from resilience_sdk.telemetry.metrics import DURATION_BOUNDS_S, FAMILIES, Durations, Family


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_names_and_labels_keep_the_conventions(family: Family) -> None:
    """Base units only and spelt out, counters end in `_total`, no label is Prometheus' own, each says what it is."""
    name = family.prometheus_name
    assert re.fullmatch(r"resilience(_[a-z]+)+", name)
    assert name.endswith("_total") == (family.kind == "counter")
    assert family.unit in ("", "s", "By", "1") or re.fullmatch(r"\{[a-z]+\}", family.unit)
    assert name.endswith("_ratio") == (family.unit == "1")
    assert not name.endswith(("_count", "_sum", "_bucket"))
    assert not {"job", "instance", "run", "node", "le"} & set(family.labels)
    assert family.about.endswith(".")


def test_no_two_metrics_have_one_name() -> None:
    """Dots and underscores must not fall together."""
    assert len({family.prometheus_name for family in FAMILIES.values()}) == len(FAMILIES)


def test_durations_fall_into_buckets_that_include_their_upper_bound() -> None:
    """As `le` says; what is beyond all bounds is counted in the last one."""
    durations = Durations()
    for seconds in (0.1, 0.11, DURATION_BOUNDS_S[-1], 1e9):
        durations.observe(seconds)
    assert durations.counts[:2] == [1, 1]
    assert durations.counts[-2:] == [1, 1]
    assert (durations.count, durations.least_s, durations.most_s, durations.last_s) == (4, 0.1, 1e9, 1e9)
