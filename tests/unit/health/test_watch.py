"""What is told of a node while a job runs there, what the watch takes from before it, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.health import runner, watch
from resilience_sdk.health.findings import Finding, Status, to_event
from resilience_sdk.health.network import interface_findings, interfaces, port_findings
from resilience_sdk.health.probes import GPU, STORAGE, Context
from resilience_sdk.health.runner import run_probes
from resilience_sdk.health.watch import (
    BUDGET,
    WATCHED,
    HealthWatch,
    judge_growth,
    log_was_read,
    pause_until_next,
    worth_another_look,
)
from resilience_sdk.system.hostinfo import host_name


def _journal(tmp_path, writer="health", host=None, job="job"):
    return Journal(tmp_path / "journal", writer=writer, host=host or host_name(), boot_id="", job=job)


def test_a_watch_reads_what_those_before_it_have_told_in_this_job(tmp_path):
    """Nothing of another job, node or writer, and nothing of the same job's time before it was requeued."""
    (tmp_path / "journal").mkdir()
    _journal(tmp_path).emit(Event.HEALTH, what="before")
    since = time.time()
    _journal(tmp_path).emit(Event.HEALTH, what="this")
    _journal(tmp_path, writer="launcher").emit(Event.HEALTH, what="of a preflight")
    _journal(tmp_path, host="elsewhere").emit(Event.HEALTH, what="elsewhere")
    _journal(tmp_path, job="other").emit(Event.HEALTH, what="of another job")
    task = watch.WatchTask(run_dir=tmp_path, job="job", interval_s=1.0, parent_pid=os.getpid(), since=since)
    assert [event["what"] for event in watch._told_before(task)] == ["this"]


def test_the_probes_are_told_which_gpus_are_the_jobs_and_nothing_else():
    """On a shared node the others are somebody else's."""
    assert watch.choice_of_gpus({"CUDA_VISIBLE_DEVICES": "1,3", "SECRET": "s"}) == {"CUDA_VISIBLE_DEVICES": "1,3"}


def test_a_job_that_is_over_at_once_is_not_watched(tmp_path):
    """Both lines are in the pipe before the first is read."""
    (tmp_path / "journal").mkdir()
    task = {"run_dir": str(tmp_path), "job": "job", "interval_s": 600.0, "parent_pid": os.getpid()}
    command = [sys.executable, "-m", "resilience_sdk.health.watch"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
    try:
        process.stdin.write(json.dumps(task).encode() + b"\nover\n")
        assert process.wait(30) == 0
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


@pytest.fixture
def hanging(tmp_path):
    """A probe that waits for a writer of a pipe for ever."""
    os.mkfifo(tmp_path / "pipe")
    return attrs.evolve(STORAGE, only=str(tmp_path / "pipe"), deadline_s=0.1)


def test_what_the_watch_kills_at_its_end_has_not_failed(tmp_path, hanging, monkeypatch):
    """It ends while a probe runs, or listens: the journal of a sound job must not say that the driver was killed.

    And no process is left to others: in a container they would be the training's, whose first may collect nobody.
    """
    (tmp_path / "journal").mkdir()
    task = watch.WatchTask(run_dir=tmp_path, job="job", interval_s=1.0, parent_pid=os.getpid())
    rounds = watch._Rounds(task, _journal(tmp_path), HealthWatch(), {})
    probe = attrs.evolve(hanging, name="gpu", deadline_s=60.0)
    look = threading.Thread(target=lambda: rounds._take(run_probes([probe], Context()), 0.0))
    look.start()
    try:
        while not runner._running:
            assert look.is_alive()
        (process,) = runner._running
        left = []
        monkeypatch.setattr(watch.os, "_exit", lambda _: left.append(os.path.exists(f"/proc/{process.pid}")))
        watch._end()
        look.join(30)
        assert (left, look.is_alive()) == ([False], False)
    finally:
        watch._over.clear()
    assert read_journal(tmp_path / "journal").events == ()


def test_what_dies_late_is_collected_while_the_watch_rests(hanging, monkeypatch):
    """No zombie stands until the next look, which may be a quarter of an hour away."""
    with monkeypatch.context() as patched:
        patched.setattr(runner.programs, "kill", lambda process, _: process.send_signal(signal.SIGSTOP))
        patched.setattr(runner, "_KILL_GRACE_S", 0.02)
        run_probes([hanging], Context())
    process = runner._left[-1].process
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie by now
    watch._rest(0.05)
    assert process.returncode is not None
    assert not runner._left


def _finding(check="throttle", status="ok", subject="GPU 0", probe="gpu", **what):
    return Finding(probe=probe, check=check, status=status, subject=subject, **what)


def _errors(value, per_minute=10.0, status="ok", check="errors", probe="gpu"):
    growth = {"growth": {"per_minute": per_minute, "cure": "the cure"}}
    return _finding(check, status, probe=probe, value=value, data=growth)


def _in_log(at, subject="host_oom_kill", status="degraded"):
    return _finding("kernel_log", status, subject, "kernel", data={"at": at})


def _told(watch, *findings):
    return ", ".join(f"{finding.check} {finding.status.value}" for finding in watch.take(findings, 60.0))


@given(st.floats(0, 5), st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 15)), min_size=2), st.floats(1, 1000))
def test_looking_costs_no_more_than_its_budget(start_cost, looks, interval):
    """Its processor time, its start included, is earned before each look but the first; none comes too early."""
    now, began, cost, last = 0.0, 0.0, start_cost, 0.0
    for number, (look_cost, took) in enumerate(looks):
        if number:
            assert now - began >= interval - 1e-6
            assert cost + last <= BUDGET * now + 1e-6
        began = now
        now += took
        cost += look_cost
        last = look_cost
        now += pause_until_next(lived_s=now, since_look_s=took, cost_s=cost, look_cost_s=look_cost, interval_s=interval)


def test_what_a_node_does_not_have_is_looked_for_once():
    """Without a driver the GPUs are not asked again; a driver that fails is."""
    driver = [_finding("driver", status, subject="") for status in ("unavailable", "failed", "ok")]
    assert worth_another_look(WATCHED, driver[:1]) == [probe for probe in WATCHED if probe != GPU]
    assert worth_another_look(WATCHED[1:], []) == list(WATCHED[1:])
    assert all(worth_another_look(WATCHED, [there]) == list(WATCHED) for there in driver[1:])


@pytest.mark.parametrize(
    ("finding", "was_read"),
    [
        (("kernel_log", "ok"), True),
        (("kernel_log", "failed"), True),
        (("kernel_log", "unavailable"), False),
        (("answers", "failed"), False),
    ],
)
def test_the_log_counts_as_read_only_where_it_was(finding, was_read):
    """After a look at it that hung or was refused, the next one reads all of it."""
    assert log_was_read([_finding(*finding, "", "kernel"), _finding("oom_kills", "ok", "", "host")]) is was_read


WELL, UNSEEN, BAD, WORSE = (_finding(status=status) for status in Status)
HANG, LOG_HANG = (_finding("answers", "failed", "", probe) for probe in ("gpu", "kernel"))
LOG, XID, NO_XID = (
    _finding("kernel_log", "ok", "", "kernel"),
    _finding("xid", "failed", value=79),
    _finding("xid", subject=""),
)
LOST, BACK, OTHER = (
    _finding("answers", status, subject) for status, subject in (("failed", "GPU 1"), ("ok", "GPU 1"), ("ok", "GPU 0"))
)
KILLS = [_errors(value, 0, "degraded", "oom_kills", "host") for value in (1, 2)]
FLAPS = [_errors(value, 0, "degraded", "interface", "network") for value in (9, 10)]


# What is seen at each look, and what of it is told.
NEWS = {
    "a fault is told when it comes, when it worsens and when it goes": [
        *((BAD, "throttle degraded"), (BAD, ""), (WORSE, "throttle failed"), (WELL, "throttle ok"), (WELL, ""))
    ],
    "what could not be seen for a while is told when it is in order: else it would be wrong for ever": [
        *((WORSE, "throttle failed"), (UNSEEN, ""), (WELL, "throttle ok"), (WELL, ""))
    ],
    "growth is told, and its end is no second fault": [
        *((_errors(100), ""), (_errors(105), ""), (_errors(200), "errors degraded"), (_errors(200), "errors ok"))
    ],
    "a counter that was reset counts from zero": [
        *((_errors(900), ""), (_errors(0), ""), (_errors(50), "errors degraded"), (_errors(50), "errors ok"))
    ],
    "a counter that was bad from the start is told when it grows": [
        *((FLAPS[0], "interface degraded"), (FLAPS[0], ""), (FLAPS[1], "interface degraded"), (FLAPS[1], ""))
    ],
    "every event is told, and that there was none is not": [
        *(((XID, XID), "xid failed, xid failed"), (NO_XID, ""), (XID, "xid failed"))
    ],
    "each kill in the log is told once, though lines are read twice, and none lasts": [
        (_in_log(100.0), "kernel_log degraded"),
        ((_in_log(100.5), _in_log(100.0, "disk_io_error")), "kernel_log degraded"),
        (LOG, ""),
        (_in_log(160.0), "kernel_log degraded"),
    ],
    "each kill that is counted is told once": [
        *((KILLS[0], "oom_kills degraded"), (KILLS[0], ""), (KILLS[1], "oom_kills degraded"), (KILLS[1], ""))
    ],
    "a hang of the kernel's log is over once it can be read": [
        *((LOG_HANG, "answers failed"), ((LOG, LOG_HANG), ""), (LOG, "answers ok"))
    ],
    "a hang that is over and comes back is told again, and what was seen before it is known": [
        *((BAD, "throttle degraded"), (HANG, "answers failed"), (HANG, "")),
        (NO_XID, ""),  # it has listened, and was not asked
        *((BAD, "answers ok"), (BAD, ""), (HANG, "answers failed")),
    ],
    "a GPU that is not named any more is not back": [(LOST, "answers failed"), (OTHER, ""), (BACK, "answers ok")],
    "what a training causes itself is not watched": [
        (_finding(check, "failed", probe=probe), "")
        for probe, check in (("gpu", "memory_held"), ("host", "load"), ("host", "stalled"), ("gpu", "probe"))
    ],
}


@pytest.mark.parametrize("looks", NEWS.values(), ids=NEWS)
def test_news_are_told(looks):
    """Look by look; what is as it was is not told."""
    watch = HealthWatch()
    for seen, told in looks:
        assert _told(watch, *(seen if isinstance(seen, tuple) else (seen,))) == told


def _network(machine, carrier, state, physical):
    """Return what is found of an interface and of a port of a node."""
    ethernet = {"operstate": "up", "carrier": carrier, "carrier_down_count": "3", "device/vendor": "0x15b3"}
    fabric = {"state": f"4: {state}", "phys_state": f"5: {physical}", "rate": "400 Gb/sec (4X NDR)"}
    files = {f"/sys/class/net/eth0/{name}": text for name, text in ethernet.items()}
    root = machine(files | {f"/sys/class/infiniband/mlx5_0/ports/1/{name}": text for name, text in fabric.items()})
    return [*interface_findings(interfaces(root)), *port_findings(root)]


def test_links_that_are_lost_are_told_until_they_are_back(machine):
    """A cable that was pulled looks like a port that was free from the start, with which nothing is wrong."""
    watch = HealthWatch()
    up, down = ("1", "ACTIVE", "LinkUp"), ("0", "DOWN", "Polling")
    assert _told(watch, *_network(machine, *up)) == ""
    lost = watch.take(_network(machine, *down), 60.0)
    found = {finding.check: finding.status.value for finding in lost}
    assert found == {"interface": "degraded", "rdma": "failed", "rdma_port": "degraded"}
    assert all(finding.cure for finding in lost)
    assert _told(watch, *_network(machine, *down)) == ""
    assert _told(HealthWatch.resumed(_journalled(lost)), *_network(machine, *down)) == ""
    assert _told(watch, *_network(machine, *up)) == "interface ok, rdma ok, rdma_port ok"
    assert _told(HealthWatch(), *_network(machine, *down)) == "rdma failed"


def test_a_gpu_that_loses_all_its_links_is_told():
    """At a first look that is a board without a bridge."""
    watch = HealthWatch()
    joined = GPU.found("nvlink_down", Status.OK, subject="GPU 0", data={"works": True})
    alone = GPU.found("nvlink_down", Status.UNAVAILABLE, subject="GPU 0", data={"works": False})
    assert (_told(HealthWatch(), alone), _told(watch, joined)) == ("", "")
    (lost,) = watch.take([alone], 60.0)
    assert (lost.check, lost.status) == ("nvlink_down", Status.DEGRADED)
    assert "reset -i 0" in lost.cure
    assert (_told(watch, alone), _told(watch, joined)) == ("", "nvlink_down ok")


def _journalled(news, at=50.0):
    return [{"event": "health", "t": at, **to_event(finding, lasts=True)} for finding in news]


def test_the_next_watch_of_a_job_knows_what_the_one_before_has_told():
    """Neither is what ails the node still told again, nor is what ails it no more bad for ever."""
    first = HealthWatch()
    told = _journalled(first.take([BAD, LOST, HANG, _errors(500, status="degraded"), _in_log(100.0)], 0.0))
    assert len(told) == 5
    again = HealthWatch.resumed([*told, {"event": "health", "t": 60.0, "what": "storage", "ok": False}])
    assert _told(again, BAD, BACK, _in_log(100.1), _errors(900)) == "answers ok, errors ok, answers ok"
    assert _told(again, BAD, _in_log(160.0)) == "kernel_log degraded"


_counts = st.integers(0, 10**6)


@given(_counts, _counts, st.floats(0, 10**5))
def test_growth_is_wrong_only_above_its_rate(before, grown, seconds):
    """A counter is degraded exactly when it grew by more than its rate allows, a minute being the shortest time."""
    (judged,) = judge_growth([_errors(before)], [_errors(before + grown)], seconds)
    allowed = 10 * max(seconds, 60) / 60
    if abs(grown - allowed) > 1e-6 * allowed:
        assert (judged.status is Status.DEGRADED) == (grown > allowed)
    assert (judged.cure == "the cure") == (judged.status is Status.DEGRADED)
    assert judged.value == before + grown
    assert judge_growth([judged], [judged], seconds) == [judged]


def test_growth_is_told_with_how_much_and_makes_nothing_better():
    """One uncorrectable error more is too much; what has failed stays failed; the first look is where it starts."""
    (judged,) = judge_growth([_errors(3, 0)], [_errors(4, 0)], 3600)
    assert (judged.status, judged.evidence) == (Status.DEGRADED, "grew by 1 to 4 within 3600 s")
    (failed,) = judge_growth([_errors(1, 0)], [_errors(9, 0, Status.FAILED)], 60)
    assert failed.status is Status.FAILED
    assert judge_growth([], [_errors(10**6)], 60) == [_errors(10**6)]
