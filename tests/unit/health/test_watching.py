"""What is told of a node while a job runs there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.watching import BUDGET, Watch, pause_after, signs_near, to_event


def _finding(check="throttle", status="ok", subject="GPU 0", probe="gpu", **what):
    return Finding(probe=probe, check=check, status=status, subject=subject, **what)


def _counter(value):
    return _finding("pcie_replays", value=value, data={"growth": {"per_minute": 8, "cure": "reseat it"}})


def _told(watch, *findings, seconds=60.0):
    return [(finding.check, finding.status.value) for finding in watch.take(findings, seconds)]


@given(st.floats(0, 100), st.floats(0, 100), st.floats(1, 1000))
def test_looking_costs_no_more_than_its_budget(took, cost, interval):
    """Over any number of looks the processor time is at most the budget, and looks are no closer than asked."""
    pause = pause_after(took, cost, interval)
    assert pause >= 0
    assert took + pause >= interval - 1e-9
    assert cost <= BUDGET * (took + pause) + 1e-9


def test_a_fault_is_told_when_it_comes_when_it_worsens_and_when_it_goes():
    """Not at every look."""
    watch = Watch()
    assert _told(watch, _finding(status="degraded")) == [("throttle", "degraded")]
    assert _told(watch, _finding(status="degraded")) == []
    assert _told(watch, _finding(status="failed")) == [("throttle", "failed")]
    assert _told(watch, _finding(status="ok")) == [("throttle", "ok")]
    assert _told(watch, _finding(status="ok")) == []


def test_growth_is_told_and_its_end_is_no_second_fault():
    """A counter that grew fast between two looks is degraded for that look."""
    watch = Watch()
    assert _told(watch, _counter(100)) == []
    assert _told(watch, _counter(105)) == []
    assert _told(watch, _counter(200)) == [("pcie_replays", "degraded")]
    assert _told(watch, _counter(200)) == [("pcie_replays", "ok")]


def test_every_event_is_told():
    """The same Xid twice is two events; that there was none is not told."""
    watch = Watch()
    xid = _finding("xid", "failed", value=79)
    assert _told(watch, xid, xid) == [("xid", "failed")] * 2
    assert _told(watch, _finding("xid", "ok", subject="", value=0)) == []
    assert _told(watch, xid) == [("xid", "failed")]


def test_a_hang_that_is_over_and_comes_back_is_told_again():
    """The finding of a hang is not there when the probe answers, and what it saw before is still known."""
    watch = Watch()
    hang = _finding("answers", "failed", subject="")
    bad = _finding(status="degraded")
    assert _told(watch, bad) == [("throttle", "degraded")]
    assert _told(watch, hang) == [("answers", "failed")]
    assert _told(watch, hang) == []
    assert _told(watch, bad) == []
    assert _told(watch, hang) == [("answers", "failed")]


@pytest.mark.parametrize(
    ("probe", "check"), [("gpu", "memory_held"), ("host", "load"), ("host", "stalled"), ("gpu", "probe")]
)
def test_what_a_training_causes_itself_is_no_news(probe, check):
    """It holds memory of its GPUs and loads its host."""
    assert _told(Watch(), _finding(check, "failed", probe=probe)) == []


def test_an_event_is_json_and_says_what_is_wrong():
    """The journal's line names it in words and in parts."""
    event = to_event(
        _finding("row_remap_pending", "degraded", evidence="a row waits", cure="reset", data={"cause": "c"})
    )
    assert json.loads(json.dumps(event)) == event
    assert event["what"] == "gpu row_remap_pending GPU 0"
    assert (event["ok"], event["why"], event["cause"]) == (False, "a row waits", "c")
    assert to_event(_finding())["ok"] is True


_times = st.floats(-10_000, 10_000)


@given(st.lists(st.tuples(_times, st.booleans()), max_size=20))
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


def test_severity_is_kept():
    """An unavailable probe is no fault and no recovery."""
    watch = Watch()
    assert _told(watch, _finding(status="failed")) == [("throttle", "failed")]
    assert _told(watch, _finding(status="unavailable")) == []
    assert watch.take([_finding(status="failed")], 1.0)[0].status is Status.FAILED
