"""Findings travel between processes and nodes, are compared between them, and explain incidents."""

import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.core.json_records import from_values
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.words import GIB, MIB, size
from resilience_sdk.health import compare, findings, software
from resilience_sdk.health.findings import (
    Finding,
    HealthReport,
    Status,
    listed,
    report_from_json,
    severity,
    signs_near,
    to_event,
)

_texts = st.text(max_size=20)
_values = st.none() | st.integers() | st.floats(allow_nan=False) | _texts
some_findings = st.builds(
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
@given(st.lists(some_findings, max_size=5))
def test_a_report_survives_json_and_is_as_bad_as_its_worst_finding(several):
    """What one process writes another reads as the same; nothing is more severe than the status of all."""
    report = HealthReport(node="n", at=1.0, took_s=2.0, findings=tuple(several))
    assert report_from_json(json.loads(json.dumps(report.to_json()))) == report
    assert all(severity(finding.status) <= severity(report.status) for finding in several)
    assert report.status in {Status.OK, *(finding.status for finding in several)}
    assert report.ok is not any(finding.must and finding.status is Status.FAILED for finding in several)


ODD, NO_DATA = ({"probe": "a", "check": "b", **more} for more in ({"status": "odd"}, {"status": "ok", "data": [1]}))


@pytest.mark.parametrize("data", [None, [], {}, {"probe": "gpu"}, ODD, NO_DATA])
def test_what_is_no_finding_is_refused(data):
    """A line that something else wrote is an error, not a finding with holes; and so is a report with such a one."""
    with pytest.raises(ValueError, match=r"Finding|Status"):
        from_values(Finding, data)
    with pytest.raises(ValueError, match=r"HealthReport|Status"):
        report_from_json({"node": "a", "at": 1, "took_s": 1, "findings": [data]})


@given(value=st.floats(0, 1e12), failed=st.floats(0, 1e12), more=st.floats(0, 1e12))
def test_grades_never_get_better_with_less(value, failed, more):
    """The limits themselves are good; below the lower one it has failed."""
    degraded = failed + more
    status = findings.low(value, degraded=degraded, failed=failed)
    assert status is (Status.FAILED if value < failed else Status.DEGRADED if value < degraded else Status.OK)
    assert findings.high(-value, degraded=-degraded, failed=-failed) is status


def test_sizes_and_names_read_well():
    """Sizes with the unit that a person would use, names each once."""
    sizes = [size(count) for count in (0, 1023, 64 * MIB, 1.5 * GIB)]
    assert sizes == ["0 bytes", "1023 bytes", "64 MiB", "1.5 GiB"]
    texts = [listed(names, most=3) for names in ("", "a", "aab", "abc", "abcde")]
    assert texts == ["", "a", "a and b", "a, b and c", "a, b, c and 2 more"]


def torch(version, cuda="12.4"):
    """Return what the software probe says of a torch."""
    return software.torch_finding({"__version__": version, "cuda": cuda})


def test_each_value_is_compared_on_its_own():
    """A torch for another CUDA is another torch; a node that could not be looked at is not odd."""
    nothing = Finding(probe="software", check="torch", status=Status.UNAVAILABLE, evidence="hangs")
    same = {"a": [torch("2.6.0")], "b": [torch("2.6.0")]}
    assert compare({**same, "c": [nothing]}) == compare(same) == compare({}) == []
    found = compare({**same, "c": [torch("2.6.0", cuda="11.8")]})
    assert [(finding.subject, finding.data["odd"]) for finding in found] == [("cuda", ["c"])]


def test_variables_and_settings_that_differ_are_warnings():
    """With the value that the others have; a role of one node is its own."""
    have, lack = ([software.variables({**env, "NCCL_SOCKET_IFNAME": "e"})] for env in ({"NCCL_ALGO": "Ring"}, {}))
    (found,) = compare({"a": have, "b": have, "c": lack})
    assert (found.subject, found.status, found.stops) == ("NCCL_ALGO", Status.DEGRADED, False)
    assert "(not set) on c" in found.evidence
    first = software.shared_settings(Settings(heartbeat_timeout="10min", straggler_role="encoder"))
    second = software.shared_settings(Settings(straggler_role="decoder"))
    (found,) = compare({"a": [first], "b": [second]})
    assert found.subject == "heartbeat_timeout"
    assert "600" in found.evidence
    assert "--config" in found.cure


@given(st.dictionaries(st.text(min_size=1), st.sampled_from(["2.5.1", "2.6.0", "2.7.0"]), min_size=1, max_size=20))
def test_odd_ones_differ_from_more_than_half(nodes):
    """And every node stands beside its own value."""
    found = compare({node: [torch(version)] for node, version in nodes.items()})
    assert bool(found) is (len(set(nodes.values())) > 1)
    for finding in found:
        assert finding.data["values"] == nodes
        odd = finding.data["odd"]
        assert 2 * len(odd) < len(nodes)
        usual = {nodes[node] for node in nodes if node not in odd}
        assert not odd or len(usual) == 1


def test_an_event_is_json_and_says_what_is_wrong():
    """The journal's line names it in words and in parts."""
    bad = Finding(probe="gpu", check="fabric", subject="GPU 0", status="failed", evidence="e", data={"cause": "c"})
    event = to_event(bad)
    assert json.loads(json.dumps(event)) == event
    told = {"what": "gpu fabric GPU 0", "ok": False, "status": "failed", "why": "e", "cause": "c"}
    assert event.items() >= told.items()
    assert to_event(attrs.evolve(bad, status="ok"))["ok"] is True


@pytest.mark.parametrize("check", ["xid", "kernel_log", "oom_kills", "answers", "memory_available"])
def test_an_event_says_whether_its_end_will_be_told(check):
    """What is over is no state of the node; nor is what a preflight has seen, after which nobody looks again."""
    finding = Finding(probe="p", check=check, status="failed")
    assert to_event(finding, lasts=True)["lasts"] is (check in ("answers", "memory_available"))
    assert to_event(finding)["lasts"] is False


@given(st.lists(st.tuples(st.floats(-10_000, 10_000), st.booleans()), max_size=20))
def test_signs_lie_within_ten_minutes_before_and_five_after(told):
    """All that is bad within the window, and nothing else; what has failed, and then the nearest, comes first."""
    at = 1.7e9
    statuses = {True: "failed", False: "degraded"}
    events = [{"event": "health", "t": at + offset, "ok": ok, "status": statuses[offset > 0]} for offset, ok in told]
    signs = signs_near(at, [*events, {"event": "rank_exit", "t": at}])
    # Beside a Unix time a float of seconds is exact to less than a microsecond.
    within = [offset for offset, ok in told if not ok and -600 - 1e-6 <= offset <= 300 + 1e-6]
    certain = [offset for offset in within if -600 + 1e-6 <= offset <= 300 - 1e-6]
    assert len(certain) <= len(signs) <= len(within)
    order = [(sign.event["status"] == "degraded", abs(sign.after_s)) for sign in signs]
    assert order == sorted(order)
    assert all(sign.before == (sign.after_s <= 0) for sign in signs)


def test_a_sign_counts_from_when_it_happened():
    """A kill for memory that the first look finds in the log may be hours old; one a moment ago came before."""
    told = {"event": "health", "ok": False, "status": "degraded"}
    (sign,) = signs_near(1000.0, [{**told, "t": 1030.0, "at": 999.0}, {**told, "t": 1030.0, "at": -9000.0}])
    assert (sign.after_s, sign.before) == (-1.0, True)
