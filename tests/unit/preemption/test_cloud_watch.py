"""The watch that asks a cloud on threads of its own, while the monitor goes on."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from resilience_sdk.preemption.cloud import ACTION, REBALANCE, CloudWatch, Heeded, cloud_poller


def until(happened, timeout_s: float = 10.0):
    """Return what `happened` tells once that is true; fail if it never is."""
    deadline = time.monotonic() + timeout_s
    while not (told := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return told


def questions() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "resilience-cloud"]


def test_a_watch_never_waits_and_sees_a_notice_come_and_go(ec2):
    """Each question is a short thread of its own, no two at a time; when nobody asks any more, none is left."""
    watch = CloudWatch(cloud_poller("aws", ec2.url), lambda _: [], lead_s=60.0, every_s=0.01)
    assert watch.notice() is None
    ec2.documents[REBALANCE] = "{}"
    assert until(watch.notice).source == "aws rebalance"
    ec2.documents[ACTION] = "{}"
    until(lambda: watch.notice().source == "aws spot")
    ec2.documents.clear()
    until(lambda: len(questions()) <= 1 and watch.notice() is None)
    until(lambda: not questions())


def test_a_watch_asks_as_often_as_it_should(ec2, clock):
    """However often the monitor looks, the service is asked once per interval."""
    watch = CloudWatch(cloud_poller("aws", ec2.url), lambda _: [], lead_s=60.0, clock=clock)
    for rounds in range(1, 4):
        for _ in range(20):
            watch.notice()
        until(lambda: not questions())
        assert len(ec2.paths(ACTION)) == rounds
        clock.pass_s(5.0)


def test_a_notice_that_was_obeyed_stops_the_next_start_before_its_end(ec2, clock, capsys):
    """Not at once; said once. The journal is asked when a notice is new, and again by a start in the same monitor."""
    ec2.documents[ACTION] = '{"action": "stop", "time": "2023-11-14T22:15:20Z"}'  # two minutes ahead
    asked, obeyed = [], [Heeded(clock.unix - 1, clock.unix + 120)]

    def heeded(notice):
        asked.append(notice)
        return obeyed

    watch = CloudWatch(cloud_poller("aws", ec2.url, clock=clock), heeded, lead_s=60.0, clock=clock)
    watch.notice()
    until(lambda: not questions())
    for _ in range(9):
        assert watch.notice() is None
        clock.pass_s(6)
        until(lambda: not questions())
    assert len(asked) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    clock.pass_s(6)
    assert watch.notice().source == "aws spot"
    obeyed.append(Heeded(clock.unix, clock.unix + 60))
    assert watch.notice() is None
    assert len(asked) == 2
    until(lambda: not questions())
