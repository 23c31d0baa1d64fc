"""Real ranks that resume: their ways back are judged by nobody, and who is slow behind them is found as ever."""

import pytest
from harness import job
from straggler_runs import found_events, least_of

pytestmark = [pytest.mark.slow, pytest.mark.alone]

KILL = "kill:rank=1,step=70"
SAVED = 60
LEAST_S = 0.015  # of 35 ms; what other programs take from a rank is less, and 80 ms differ while batches are read again


def resumed(folder, *, fault=KILL, steps=240):
    """Have two ranks killed in the middle, and resume 60 steps into their data; return the job at its end."""
    with job(
        folder,
        "--nproc-per-node",
        "2",
        "--checkpoint-every",
        str(SAVED),
        "uneven_resume.py",
        "--steps",
        str(steps),
        env={"RESILIENCE_FAULT": fault},
    ) as run:
        assert run.finish() == 0, run.screen
    assert f"reading its first {SAVED} batches" in run.screen
    return run


def test_what_comes_before_the_first_step_of_an_attempt_is_not_judged(tmp_path):
    """One rank reads its batches again five times as slowly, and compiles a second longer: no verdict, no incident.

    The loader's own data section lies in that of `Run.steps`: its time counts once.
    """
    run = resumed(tmp_path)
    assert found_events(run, least=LEAST_S) == []
    assert [incident["kind"] for incident in run.incidents()] == ["crash"]
    took = run.events("step_time")[-1]
    assert 0.02 * took["steps"] < took["data_s"] < took["wall_s"]


def test_who_is_slow_after_a_resume_is_found_as_ever(tmp_path):
    """60 ms in the forward of rank 0, which had the short way back: named within some windows, with an incident."""
    slow_at = SAVED + 20
    fault = f"{KILL};slow:rank=0,section=fwd,seconds=0.06,attempt=1,step={slow_at}"
    run = resumed(tmp_path, fault=fault, steps=400)
    found = found_events(run, least=least_of(0.06))
    assert {(tuple(event["ranks"]), event["section"]) for event in found} == {((0,), "fwd")}
    assert slow_at <= found[0]["step"] <= slow_at + 48
    crash, slow = run.incidents()
    assert (crash["kind"], slow["kind"]) == ("crash", "slow")
    assert [(culprit["rank"], culprit["section"]) for culprit in slow["culprits"]] == [(0, "fwd")]
