"""Checkpoint intervals and expected ETTR, in closed form and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told_fleet import ToldFleetRun

from resilience_sdk.cli.main import main
from resilience_sdk.goodput.plan import (
    RATES,
    PlannedJob,
    best_interval_s,
    daly_s,
    expected_ettr,
    mttf_s,
    simulated_ettr,
    young_s,
)
from resilience_sdk.incidents import Incident, IncidentStore

MIN = 60.0


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_it_gives_the_published_times_between_failures(gpus: int, hours: float) -> None:
    """Kokolis et al., projected by their rate of RSC-1; within 5 %."""
    assert mttf_s(gpus // 8, RATES["rsc-1"]) / 3600 == pytest.approx(hours, rel=0.05)


@pytest.mark.parametrize(
    ("gpus", "rate", "interval_s", "restart_s", "published"),
    [
        (16_384, "rsc-1", 5 * MIN, 5 * MIN, 0.93),
        (16_384, "rsc-1", 60 * MIN, 5 * MIN, 0.7),
        (100_000, "rsc-2", 2 * MIN, 2 * MIN, 0.9),
    ],
)
def test_it_gives_the_published_ettr(
    gpus: int, rate: str, interval_s: float, restart_s: float, published: float
) -> None:
    """Kokolis et al., saves that block nothing; closed form and simulation, within 5 %."""
    job = PlannedJob(mttf_s(gpus // 8, RATES[rate]), restart_s=restart_s)
    assert expected_ettr(job, interval_s) == pytest.approx(published, rel=0.05)
    assert simulated_ettr(job, interval_s)[0] == pytest.approx(published, rel=0.05)


jobs = st.builds(
    PlannedJob,
    mttf_s=st.floats(600, 1e7),
    write_s=st.floats(0.1, 120),
    restart_s=st.floats(0, 900),
    detect_s=st.floats(0, 900),
    persist_s=st.floats(0, 120),
)


@given(jobs, st.floats(0.3, 3))
@settings(max_examples=15, deadline=None)
def test_the_simulation_agrees_with_the_closed_form(job: PlannedJob, times: float) -> None:
    """Though it draws failures one by one, also while a job starts."""
    interval_s = times * best_interval_s(job)
    mean, low, high = simulated_ettr(job, interval_s)
    assert low <= mean <= high
    assert mean == pytest.approx(expected_ettr(job, interval_s), rel=0.04, abs=0.004)


@given(jobs)
@settings(max_examples=50, deadline=None)
def test_no_interval_is_better_than_the_best(job: PlannedJob) -> None:
    """Nor is Daly's far from it where a save is short beside the time between failures."""
    best_s = best_interval_s(job)
    most = expected_ettr(job, best_s)
    assert all(expected_ettr(job, best_s * times) <= most + 1e-9 for times in (0.5, 0.9, 1.1, 2.0))
    if job.write_s < job.mttf_s / 50:
        assert daly_s(job) == pytest.approx(best_s, rel=0.02)
        assert young_s(job) == pytest.approx(best_s, rel=0.12)


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """With where each number is from, and what a change would bring."""
    assert main(["plan", "--gpus", "16,384", "--write", "30s", "--restart", "5min"]) == 0
    text = capsys.readouterr().out
    assert "MTTF 1.8 h (default, 6.5 failures per 1,000 node-days)" in text
    assert "in closed form" in text
    assert "half the restart" in text
    assert main(["plan", "--mttf", "2h", "--write", "0", "--interval", "10min", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["mttf_s"], plan["interval_s"], plan["nodes"]) == (7200, 600, None)
    assert plan["ettr_simulated_low"] <= plan["ettr"] <= plan["ettr_simulated_high"] + 0.01
    assert plan["sources"] == {
        "write": "given", "persist": "default", "restart": "default", "detect": "default", "mttf": "given",
    }  # fmt: skip


def test_like_a_run_takes_what_was_measured_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How late its faults were noticed, too; one in which nothing has failed has no mean time between failures."""
    run = ToldFleetRun.make(tmp_path / "run", ["A"])
    run.start()
    assert main(["plan", "--like", str(run.path)]) == 2
    assert "nothing has failed in" in capsys.readouterr().err
    run.at += 3600.0
    run.fail("A", "rank_killed_sigkill", "process")
    IncidentStore(run.path).create("crash", Incident(detected_at=run.at, detection_latency_s=0.25))
    run.at += 3600.0
    run.end()
    assert main(["plan", "--like", str(run.path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["sources"]["detect"], plan["detect_s"]) == ("measured", 0.25)
    assert main(["plan", "--like", str(run.path)]) == 0
    assert "detect         0.25 s (measured)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "how large is the job?"),
        (["--gpus", "0"], "'0': expected a whole number"),
        (["--gpus", "8", "--write", "soon"], "'soon': expected seconds"),
        (["--gpus", "8", "--write", "0"], "has no best interval"),
        (["--gpus", "8", "--failures", "rsc-3"], "rsc-1, rsc-2"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that names the value."""
    assert main(["plan", *words]) == 2
    assert says in capsys.readouterr().err
