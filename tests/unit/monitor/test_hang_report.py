"""What is said of a confirmed hang."""

from __future__ import annotations

import time

import attrs
import pytest

import resilience_sdk
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.culprit import CulpritFinding
from resilience_sdk.hang.detect import Judgement
from resilience_sdk.hang.timers import RankState
from resilience_sdk.hang.waits import On
from resilience_sdk.incidents import Evidence
from resilience_sdk.monitor.hang_report import hang_incident, hang_lines, shown_frames

OURS = f"{resilience_sdk.__path__[0]}/faults.py:182 _deadlock"
TORCH = "/env/lib/python3.11/site-packages/torch/autograd/graph.py:979 _engine_run_backward"
USERS = "/home/u/resilience_sdk/train.py:30 train_step"
MAIN = "/home/u/train.py:44 main"


@pytest.mark.parametrize(
    ("stack", "shown"),
    [
        ([USERS, MAIN], [USERS, MAIN]),
        ([TORCH, TORCH, TORCH, TORCH, USERS, MAIN], [TORCH, TORCH, USERS]),
        ([OURS, OURS, OURS, USERS, MAIN], [USERS, MAIN]),
        ([TORCH, TORCH, TORCH, TORCH], [TORCH, TORCH]),
        ([OURS, OURS], [OURS, OURS]),
        ([], []),
    ],
)
def test_a_line_of_the_user_is_among_the_frames_that_are_shown(stack, shown):
    """Three frames of a library say nothing to a person who looks for a line in the script."""
    assert shown_frames(stack) == shown


def confirmed(activity, *facts, cause="hang_rank_stuck", category="hang"):
    """The incident of a rank that does so, at noon of the first day."""
    finding = CulpritFinding((0,), (1,), category, cause, 0.9, (Evidence("stack", "rank 0 is outside"),))
    states = [RankState(rank=0, node="a", activity=activity), RankState(rank=1, node="a")]
    judgement = Judgement("confirmed", waited_for=(0,), detail="rank 0 is waited for")
    return hang_incident(
        judgement, finding, states, {}, facts, attempt=0, on_hang="restart", now_ns=10**12, now=43200.0
    )


def test_the_rule_is_said_once():
    """Also where nothing else says why."""
    finding = CulpritFinding((0,), (1,), "hang", "hang_rank_stuck", 0.9, (Evidence("rule", "called hung by 3 x"),))
    incident = hang_incident(
        Judgement("confirmed", waited_for=(0,), detail="rank 0 is waited for"),
        finding,
        [RankState(rank=0, node="a"), RankState(rank=1, node="a")],
        {},
        (),
        attempt=0,
        on_hang="restart",
        now_ns=10**12,
        now=43200.0,
    )
    incident = attrs.evolve(incident, evidence=(Evidence("rule", "called hung by 3 x"),))
    assert sum("called hung by" in line for line in hang_lines(incident, "restart", "/r")) == 1


@pytest.mark.parametrize(
    ("activity", "words"),
    [
        (Activity(Kind.STUCK, 60.0, On.LOCK, woke_s=60.0), "its wait ended at 11:59:00 and it has not moved since"),
        (Activity(Kind.STUCK, 60.0, On.SLEEP, ends_in_s=-2.0), "its wait ended at 11:59:58 and it has not moved since"),
        (Activity(Kind.STUCK, 60.0, On.SLEEP, ends_in_s=3540.0), "sleeps until 12:59:00, in 3540 s"),
        (Activity(Kind.STUCK, 60.0, On.LOCK), None),
        (Activity(Kind.POLLING, 60.0, On.SLEEP, ends_in_s=1.0), None),
    ],
)
def test_a_hang_after_a_wait_with_an_end_says_when_that_was(monkeypatch, activity, words):
    """By the clock of this place."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        found = [one.text for one in confirmed(activity).evidence if one.source == "wait"]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == ([f"rank 0: {words}"] if words is not None else [])


def test_a_stalled_save_is_told_with_its_place():
    """The line of the hang says that it is a save, and into what."""
    place = Evidence("storage", "rank 0 saves into /mnt/a.pt (nfs on /mnt)")
    incident = confirmed(Activity(Kind.STUCK, 300.0, On.FILE), place, cause="checkpoint_stall", category="storage")
    first, *lines = hang_lines(incident, "restart", "runs/a")
    assert "rank 0 on a stands in a save" in first
    assert first.endswith("(checkpoint_stall)")
    assert f"  storage: {place.text}" in lines
