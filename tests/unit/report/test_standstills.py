"""What stood still and went on by itself: it is told where it matters, on every page, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from told_fleet import ToldFleetRun

from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.report.facts import RunFacts
from resilience_sdk.report.page import render_sections
from resilience_sdk.report.read import read_run

RANK = {
    "rank": 1, "node": "A", "step": 443, "step_is_global": False, "section": "fwd", "activity": "stopped",
    "still_s": 8.0, "detail": "it is stopped (process state T)", "frame": None, "stack": [],
}  # fmt: skip


@pytest.fixture(autouse=True)
def pages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job of this machine is seen."""
    monkeypatch.setenv("RESILIENCE_PAGE_DIR", str(tmp_path_factory.mktemp("pages")))


def begun(path: Path) -> ToldFleetRun:
    """Return a run of two ranks that train."""
    run = ToldFleetRun.make(path, ["A"], ranks_per_node=2)
    train(run)
    return run


def train(run: ToldFleetRun) -> None:
    """Have a job begin, and its ranks step."""
    run.start()
    run.at += 5.0
    for rank in (0, 1):
        run.tell("A", Event.FIRST_BEAT, writer="monitor", rank=rank)
    run.at += 10.0


def stand(run: ToldFleetRun, seconds: float, why: str = "went on", **of_rank: Any) -> None:
    """Have a rank stand for so long, as its monitor tells."""
    told = {"ranks": [RANK | of_rank], "waiting": [0], "verdict_in_s": 50.0, "rule": "", "text": "no progress"}
    run.at += seconds / 2
    run.tell("A", Event.STALL, writer="monitor", since=run.at - seconds / 2, for_s=seconds / 2, **told)
    run.at += seconds / 2
    run.tell("A", Event.STALL_END, writer="monitor", after_s=seconds, why=why)


def over(run: ToldFleetRun, after_s: float) -> RunFacts:
    """Have the job train on and end well, and return its facts."""
    run.at += after_s
    run.tell("A", Event.DECISION, verdict="finished", exit_code=0, reason="all ranks exited with 0")
    run.tell("A", Event.FINISHED)
    run.close()
    (run.path / "finished").touch()
    return read_run(RunDirectory(run.path))


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return what a command prints."""
    assert main(list(command)) == 0
    return capsys.readouterr().out


def test_every_page_tells_who_stood_where_and_for_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence in the summary, in `why` and in `outcome`; a pin that leads to it."""
    run = begun(tmp_path / "run")
    stand(run, 40.0)
    facts = over(run, 45.0)
    said = "Rank 1 on A was stopped for 40.0 s at step 443 of attempt 0, section fwd, and went on by itself"
    assert facts.stood == f"{said}: 40% of the 1.7 min of its job."
    assert [(pin.kind, pin.at, pin.label) for pin in facts.pins] == [("hang", 1_000_015.0, f"{said}.")]
    page = render_sections(facts)
    assert facts.stood in page["summary"]
    assert f"{said}." in page["incidents"]
    (place,) = [f"incident-{one.id}" for one in facts.standstills]
    assert f'href="#{place}"' in page["time"]
    assert f'id="{place}"' in page["incidents"]
    assert facts.stood in printed(capsys, "why", str(run.path))
    assert facts.stood in printed(capsys, "outcome", str(run.path))
    (told,) = json.loads(printed(capsys, "why", str(run.path), "--json"))["standstills"]
    assert (told["rank"], told["section"], told["seconds"], told["attempt"]) == (1, "fwd", 40.0, 0)


@pytest.mark.parametrize(
    ("seconds", "trains_s", "of_rank", "matters"),
    [
        (12.0, 200.0, {}, True), (12.0, 300.0, {}, False), (9.0, 20.0, {}, False), (61.0, 1e5, {}, True),
        (40.0, 20.0, {"activity": "busy"}, False), (40.0, 20.0, {"activity": "stuck", "section": "data"}, False),
    ],
)  # fmt: skip
def test_what_is_little_or_a_long_wait_is_not_told(
    tmp_path: Path, seconds: float, trains_s: float, of_rank: dict[str, Any], matters: bool
) -> None:
    """5 % of the job and 10 s, or a minute; no rank that works, loads or saves."""
    run = begun(tmp_path / "run")
    stand(run, seconds, **of_rank)
    facts = over(run, trains_s)
    assert (facts.stood is not None, bool(facts.pins), bool(facts.standstills)) == (matters,) * 3


def test_many_short_ones_are_told_together_and_those_of_a_job_before_are_none_of_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest is named. `why` tells of all jobs, as it does of incidents."""
    run = begun(tmp_path / "run")
    for number, seconds in enumerate((11.0, 15.0, 12.0)):
        stand(run, seconds, step=100 * number, section="step", node="A")
        run.at += 30.0
    run.tell("A", Event.DECISION, verdict="preempted", exit_code=75, reason="asked")
    first = read_run(RunDirectory(run.path)).stood
    longest = "longest: rank 1 on A was stopped for 15.0 s at step 100 of attempt 0, and went on by itself."
    assert first is not None
    assert first.startswith("3 times the run stood still and went on by itself, for 38.0 s together: 27% of the ")
    assert first.endswith(longest)
    train(run)
    facts = over(run, 100.0)
    assert (facts.stood, len(facts.pins)) == (None, 3)
    assert longest in printed(capsys, "why", str(run.path))
    assert "stood still" not in printed(capsys, "outcome", str(run.path))
