"""Findings travel between processes, and between nodes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.health.findings import Finding, Status, finding_from_json, severity, worst

_texts = st.text(max_size=20)
_values = st.none() | st.integers() | st.floats(allow_nan=False) | _texts
findings = st.builds(
    Finding,
    probe=_texts,
    check=_texts,
    status=st.sampled_from(list(Status)),
    subject=_texts,
    value=_values,
    unit=_texts,
    threshold=_values,
    evidence=_texts,
    cure=_texts,
    must=st.booleans(),
    data=st.dictionaries(_texts, _values, max_size=3),
)


@settings(max_examples=15)
@given(findings)
def test_a_finding_survives_json(finding):
    """What one process writes another reads as the same finding."""
    assert finding_from_json(json.loads(json.dumps(finding.to_json()))) == finding


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"probe": "gpu"},
        {"probe": "a", "check": "b", "status": "odd"},
        {**Finding(probe="a", check="b", status="ok").to_json(), "x": 1},
    ],
)
def test_what_is_no_finding_is_refused(data):
    """A line that something else wrote is an error, not a finding with holes."""
    with pytest.raises(ValueError, match=r"finding|Status"):
        finding_from_json(data)


@settings(max_examples=15)
@given(st.lists(findings, max_size=5))
def test_the_worst_is_the_most_severe(several):
    """Nothing is more severe than the worst, and the worst of nothing is ok."""
    top = worst(several)
    assert all(severity(finding.status) <= severity(top) for finding in several)
    assert top in {Status.OK, *(finding.status for finding in several)}


def test_only_a_failed_must_stops():
    """A job is stopped by what is failed and must not be, and by nothing else."""
    stopping = {
        (status, must)
        for status in Status
        for must in (True, False)
        if Finding(probe="p", check="c", status=status, must=must).stops
    }
    assert stopping == {(Status.FAILED, True)}
