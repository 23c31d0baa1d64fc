"""The watch that asks a cloud on threads of its own, while the monitor goes on."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.preemption.cloud import ACTION, REBALANCE, CloudWatch, cloud_poller
from resilience_sdk.system.hostinfo import boot_id


def until(happened, timeout_s: float = 10.0):
    """Return what `happened` tells once that is true; fail if it never is."""
    deadline = time.monotonic() + timeout_s
    while not (told := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return told


def obeyed(journal: Path, reason: str, unix_s: float, left_s: float) -> None:
    """Have a start of the job on this machine stop for the notice: its journal says so."""
    writer = Journal(journal, writer="monitor", host="here", boot_id=boot_id(), job="job")
    writer.emit(Event.PREEMPT_NOTICE, source="aws spot", reason=reason, time_left_s=left_s)
    writer.emit(Event.STOP_AGREED)
    for path in journal.glob("*.jsonl"):
        told = [json.loads(line) for line in path.read_text().splitlines()]
        lately = (dict(event, t=unix_s) if event["t"] > unix_s + 1e6 else event for event in told)
        path.write_text("".join(json.dumps(event) + "\n" for event in lately))


def questions() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "resilience-cloud"]


def test_a_watch_never_waits_and_sees_a_notice_come_and_go(ec2, tmp_path):
    """Each question is a short thread of its own, no two at a time; when nobody asks any more, none is left."""
    watch = CloudWatch(cloud_poller("aws", ec2.url), tmp_path, lead_s=60.0, every_s=0.01)
    assert watch.notice() is None
    ec2.documents[REBALANCE] = "{}"
    assert until(watch.notice).source == "aws rebalance"
    ec2.documents[ACTION] = "{}"
    until(lambda: watch.notice().source == "aws spot")
    ec2.documents.clear()
    until(lambda: len(questions()) <= 1 and watch.notice() is None)
    until(lambda: not questions())


def test_a_watch_asks_as_often_as_it_should(ec2, clock, tmp_path):
    """However often the monitor looks, the service is asked once per interval."""
    watch = CloudWatch(cloud_poller("aws", ec2.url), tmp_path, lead_s=60.0, clock=clock)
    for rounds in range(1, 4):
        for _ in range(20):
            watch.notice()
        until(lambda: not questions())
        assert len(ec2.paths(ACTION)) == rounds
        clock.pass_s(5.0)


def test_a_notice_that_was_obeyed_stops_the_next_start_before_its_end(ec2, clock, capsys, tmp_path):
    """Not at once; said once. The journal is asked when a notice is new, and again by a start in the same monitor."""
    ec2.documents[ACTION] = '{"action": "stop", "time": "2023-11-14T22:15:20Z"}'  # two minutes ahead
    poller = cloud_poller("aws", ec2.url, clock=clock)
    reason = poller.poll().reason
    obeyed(tmp_path, reason, clock.unix - 1, 121)
    watch = CloudWatch(poller, tmp_path, lead_s=60.0, clock=clock)
    watch.notice()
    until(lambda: not questions())
    for _ in range(9):
        assert watch.notice() is None
        clock.pass_s(6)
        until(lambda: not questions())
    assert len(capsys.readouterr().err.splitlines()) == 1
    clock.pass_s(6)
    assert watch.notice().source == "aws spot"
    obeyed(tmp_path, reason, clock.unix, 60)
    assert watch.notice() is None
    until(lambda: not questions())
