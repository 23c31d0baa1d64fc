"""What is told of a node while a job runs there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu.links import NvLinks, judge_nvlinks
from resilience_sdk.health.network.infiniband import port_findings, ports
from resilience_sdk.health.network.interfaces import interface_findings, interfaces
from resilience_sdk.health.probes import GPU
from resilience_sdk.health.watching import (
    BUDGET,
    WATCHED,
    Watch,
    log_was_read,
    pause_until_next,
    signs_near,
    to_event,
    worth_another_look,
)


def _finding(check="throttle", status="ok", subject="GPU 0", probe="gpu", **what):
    return Finding(probe=probe, check=check, status=status, subject=subject, **what)


def _counter(value):
    return _finding("pcie_replays", value=value, data={"growth": {"per_minute": 8, "cure": "reseat it"}})


def _told(watch, *findings, seconds=60.0):
    return [(finding.check, finding.status.value) for finding in watch.take(findings, seconds)]


@given(st.floats(0, 5), st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 15)), min_size=2), st.floats(1, 1000))
def test_looking_costs_no_more_than_its_budget(start_cost, looks, interval):
    """From the second look on the processor time, its start included, is within the budget; none comes too early."""
    now, began, cost, dearest = 0.0, 0.0, start_cost, 0.0
    for number, (look_cost, took) in enumerate(looks):
        if number:
            assert now - began >= interval - 1e-6
            assert cost <= BUDGET * now + 1e-6
        began = now
        now += took
        cost += look_cost
        dearest = max(dearest, look_cost)
        assert number == 0 or cost <= BUDGET * now + dearest + 1e-6
        now += pause_until_next(lived_s=now, since_look_s=took, cost_s=cost, look_cost_s=look_cost, interval_s=interval)


def test_looks_that_cost_alike_stay_within_the_budget_at_any_moment():
    """Not only on the whole: after the first look, the next one has been earned before it is made."""
    now, cost = 0.0, 0.2
    for number in range(50):
        cost += 0.5
        assert number == 0 or cost <= BUDGET * now + 1e-6
        now += 1.0
        now += pause_until_next(lived_s=now, since_look_s=1.0, cost_s=cost, look_cost_s=0.5, interval_s=60.0)


def test_what_a_node_does_not_have_is_looked_for_once():
    """Without a driver the GPUs are not asked again; a driver that fails is."""
    missing = _finding("driver", "unavailable", subject="")
    assert GPU not in (left := worth_another_look(WATCHED, [missing]))
    assert len(left) == len(WATCHED) - 1
    assert worth_another_look(left, []) == left
    for driver in (_finding("driver", "failed", subject=""), _finding("driver", "ok", subject="")):
        assert worth_another_look(WATCHED, [driver]) == list(WATCHED)


def test_the_log_counts_as_read_only_where_it_was():
    """After a look at it that hung or was refused, the next one reads all of it."""
    assert log_was_read([_finding("kernel_log", "ok", "", "kernel")])
    assert log_was_read([_finding("kernel_log", "failed", "gpu_fell_off_bus", "kernel")])
    assert not log_was_read([_finding("kernel_log", "unavailable", "", "kernel")])
    assert not log_was_read([_finding("answers", "failed", "", "kernel"), _finding("oom_kills", "ok", "", "host")])


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


def _network(machine, carrier, state, physical):
    """Return what is found of an interface and of a port of a node."""
    ethernet = {"operstate": "up", "carrier": carrier, "carrier_down_count": "3", "device/vendor": "0x15b3"}
    fabric = {"state": f"4: {state}", "phys_state": f"5: {physical}", "rate": "400 Gb/sec (4X NDR)"}
    files = {f"/sys/class/net/eth0/{name}": text for name, text in ethernet.items()}
    root = machine(files | {f"/sys/class/infiniband/mlx5_0/ports/1/{name}": text for name, text in fabric.items()})
    return [*interface_findings(interfaces(root)), *port_findings(ports(root))]


def test_links_that_are_lost_are_told_until_they_are_back(machine):
    """A cable that was pulled looks like a port that was free from the start, with which nothing is wrong."""
    watch = Watch()
    up, down = ("1", "ACTIVE", "LinkUp"), ("0", "DOWN", "Polling")
    assert _told(watch, *_network(machine, *up)) == []
    lost = watch.take(_network(machine, *down), 60.0)
    assert {(finding.check, finding.status.value) for finding in lost} == {
        ("interface", "degraded"),
        ("rdma", "failed"),
        ("rdma_port", "degraded"),
    }
    assert all(finding.cure for finding in lost)
    assert _told(watch, *_network(machine, *down)) == []
    assert _told(Watch.resumed(_journalled(lost)), *_network(machine, *down)) == []
    assert sorted(_told(watch, *_network(machine, *up))) == [("interface", "ok"), ("rdma", "ok"), ("rdma_port", "ok")]
    assert _told(Watch(), *_network(machine, *down)) == [("rdma", "failed")]


def test_a_gpu_that_loses_all_its_links_is_told():
    """At a first look that is a board without a bridge."""
    watch = Watch()
    (joined,) = judge_nvlinks("GPU 0", NvLinks(up=(0, 1), down=()))
    (alone,) = judge_nvlinks("GPU 0", NvLinks(up=(), down=(0, 1)))
    assert _told(Watch(), alone) == []
    assert _told(watch, joined) == []
    (lost,) = watch.take([alone], 60.0)
    assert (lost.check, lost.status) == ("nvlink_down", Status.DEGRADED)
    assert "reset" in lost.cure
    assert " N" not in lost.cure
    assert _told(watch, alone) == []
    assert _told(watch, joined) == [("nvlink_down", "ok")]


def test_every_event_is_told():
    """The same Xid twice is two events; that there was none is not told."""
    watch = Watch()
    xid = _finding("xid", "failed", value=79)
    assert _told(watch, xid, xid) == [("xid", "failed")] * 2
    assert _told(watch, _finding("xid", "ok", subject="", value=0)) == []
    assert _told(watch, xid) == [("xid", "failed")]


def test_a_hang_of_the_kernels_log_is_over_once_it_can_be_read():
    """Its probe yields nothing that lasts."""
    watch = Watch()
    hang = _finding("answers", "failed", subject="", probe="kernel")
    assert _told(watch, hang) == [("answers", "failed")]
    assert _told(watch, _finding("kernel_log", subject="", probe="kernel"), hang) == []
    assert _told(watch, _finding("kernel_log", subject="", probe="kernel")) == [("answers", "ok")]


def test_a_hang_that_is_over_and_comes_back_is_told_again():
    """The finding of a hang is not there when the probe answers: its end is told, and what it saw before is known."""
    watch = Watch()
    hang = _finding("answers", "failed", subject="")
    bad = _finding(status="degraded")
    assert _told(watch, bad) == [("throttle", "degraded")]
    assert _told(watch, hang) == [("answers", "failed")]
    assert _told(watch, hang) == []
    assert _told(watch, _finding("xid", "ok", subject="")) == []  # it has listened, and was not asked
    assert _told(watch, bad) == [("answers", "ok")]
    assert _told(watch, bad) == []
    assert _told(watch, hang) == [("answers", "failed")]


def test_a_gpu_that_is_not_named_any_more_is_not_back():
    """The others answer, and it is gone."""
    watch = Watch()
    assert _told(watch, _finding("answers", "failed", "GPU 1")) == [("answers", "failed")]
    assert _told(watch, _finding("answers", "ok", "GPU 0")) == []
    assert _told(watch, _finding("answers", "ok", "GPU 1")) == [("answers", "ok")]


def _in_log(at, subject="host_oom_kill", status="degraded"):
    return _finding("kernel_log", status, subject, "kernel", data={"at": at})


def test_each_kill_for_memory_is_told_and_none_lasts():
    """The second one of its kind as well as the first, each once, though lines of the log are read twice."""
    watch = Watch()
    assert _told(watch, _in_log(100.0)) == [("kernel_log", "degraded")]
    assert _told(watch, _in_log(100.5), _in_log(100.0, "disk_io_error")) == [("kernel_log", "degraded")]
    assert _told(watch, _finding("kernel_log", "ok", "", "kernel")) == []
    assert _told(watch, _in_log(160.0)) == [("kernel_log", "degraded")]
    counter = {"growth": {"per_minute": 0, "cure": "use less"}}
    kills = [_finding("oom_kills", "degraded", "", "host", value=value, data=counter) for value in (1, 1, 2, 2)]
    assert [len(watch.take([kill], 60.0)) for kill in kills] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("finding", "lasts"),
    [
        (_finding("xid", "failed", value=79), False),
        (_in_log(100.0), False),
        (_finding("oom_kills", "degraded", "", "host"), False),
        (_finding("answers", "failed", "GPU 0"), True),
        (_finding("memory_available", "failed", "", "host"), True),
    ],
)
def test_an_event_says_whether_its_end_will_be_told(finding, lasts):
    """What is over is no state of the node; nor is what a preflight has seen, after which nobody looks again."""
    assert to_event(finding, lasts=True)["lasts"] is lasts
    assert to_event(finding)["lasts"] is False


def test_what_ailed_and_could_not_be_seen_for_a_while_is_told_when_it_is_in_order():
    """Else it would be wrong for ever to whoever was told."""
    watch = Watch()
    assert _told(watch, _finding(status="failed")) == [("throttle", "failed")]
    assert _told(watch, _finding(status="unavailable")) == []
    assert _told(watch, _finding(status="ok")) == [("throttle", "ok")]
    assert _told(watch, _finding(status="ok")) == []


def test_a_counter_that_was_bad_from_the_start_is_told_when_it_grows():
    """Its status is the same before and after."""
    watch = Watch()
    growth = {"growth": {"per_minute": 0, "cure": "replace the cable"}}
    bad = [_finding("interface", "degraded", "eth0", "network", value=value, data=growth) for value in (9, 9, 10, 10)]
    assert [len(watch.take([finding], 60.0)) for finding in bad] == [1, 0, 1, 0]


def _journalled(news, at=50.0):
    return [{"event": "health", "t": at, **to_event(finding, lasts=True)} for finding in news]


def test_the_next_watch_of_a_job_knows_what_the_one_before_has_told():
    """Neither is what ails the node still told again, nor is what ails it no more bad for ever."""
    hot, lost, dead = (
        _finding(status="degraded"),
        _finding("answers", "failed", "GPU 1"),
        _finding("answers", "failed", ""),
    )
    counter = _finding("pcie_replays", "degraded", value=500, data={"growth": {"per_minute": 8, "cure": "reseat"}})
    first = Watch()
    told = _journalled(first.take([hot, lost, dead, counter, _in_log(100.0)], 0.0))
    assert len(told) == 5
    again = Watch.resumed([*told, {"event": "health", "t": 60.0, "what": "storage", "ok": False}])
    grown = _counter(900)
    assert _told(again, hot, _finding("answers", "ok", "GPU 1"), _in_log(100.1), grown) == [
        ("answers", "ok"),
        ("pcie_replays", "ok"),
        ("answers", "ok"),
    ]
    assert _told(again, hot, _in_log(160.0)) == [("kernel_log", "degraded")]


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


def test_a_sign_counts_from_when_it_happened():
    """A kill for memory that the first look finds in the log may be hours old; one a moment ago came before."""
    told = {"event": "health", "ok": False, "status": "degraded"}
    (sign,) = signs_near(1000.0, [{**told, "t": 1030.0, "at": 999.0}, {**told, "t": 1030.0, "at": -9000.0}])
    assert (sign.after_s, sign.before) == (-1.0, True)


def test_severity_is_kept():
    """An unavailable probe is no fault and no recovery."""
    watch = Watch()
    assert _told(watch, _finding(status="failed")) == [("throttle", "failed")]
    assert _told(watch, _finding(status="unavailable")) == []
    assert watch.take([_finding(status="failed")], 1.0)[0].status is Status.FAILED
