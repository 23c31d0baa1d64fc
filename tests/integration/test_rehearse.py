"""`resilience rehearse` on real jobs: one that does all as it should, and six with one fault of integration each."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SCRIPTS

from tests.rehearsals import Rehearsed, rehearse


def rehearsed(folder: Path, *words: str, script: str = "") -> Rehearsed:
    """Rehearse the script of these tests, with that fault of its own."""
    return rehearse(folder, *words, script=SCRIPTS / "rehearsed.py", arguments=(script,) if script else ())


@pytest.mark.slow
def test_a_good_job_passes_and_leaves_nothing(tmp_path: Path) -> None:
    """Every promise is kept, a total time is said before the faults, and the scratch directory is gone."""
    done = rehearsed(tmp_path, "kill", "preempt")
    assert done.code == 0, done.screen
    assert {*done.results("none").values(), *done.results("kill").values(), *done.results("preempt").values()} == {
        "PASS"
    }
    assert set(done.results("kill")) >= {"noticed", "named", "recovered", "steps lost", "save complete", "end equal"}
    assert done.screen.index(" in all") < done.screen.index("RESILIENCE_FAULT=")
    assert (done.left, done.document["kept"]) == ([], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "fault", "broken"),
    [
        ("alone", "none", "save complete"),
        ("no-progress", "none", "progress seen"),
        ("eats", "preempt", "noticed"),
        ("rank0", "preempt", "all ranks left"),
        ("data", "kill", "end equal"),
        ("in-place", "corrupt-checkpoint", "save complete"),
    ],
)
def test_a_fault_of_integration_is_found(tmp_path: Path, script: str, fault: str, broken: str) -> None:
    """With exit code 1, by the promise that is about it, with a cure, and what it left is kept and named."""
    words = ("kill", "--stuck-after", "2") if fault == "none" else (fault,)
    done = rehearsed(tmp_path, *words, script=script)
    assert (done.code, done.results(fault)[broken]) == (1, "FAIL"), done.screen
    assert "cure: " in done.screen
    [kept] = done.left
    assert done.document["kept"] == str(kept)
    assert (kept / ("undisturbed" if fault == "none" else fault) / "output.log").read_text()


@pytest.mark.slow
def test_a_job_goes_on_at_its_own_pace_once_the_answer_is_there(tmp_path: Path) -> None:
    """Its ranks are told so as soon as the journal has it, and not by a time."""
    kept = tmp_path / "kept"
    done = rehearsed(tmp_path, "monitor-kill", "--keep", str(kept))
    assert (done.code, done.results("monitor-kill")["noticed"]) == (0, "PASS"), done.screen
    assert [path.parent.parent.name for path in kept.glob("*/traces-*/answered")] == ["monitor-kill"]
