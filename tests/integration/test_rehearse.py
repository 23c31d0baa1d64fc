"""`resilience rehearse` on real jobs: one that does all as it should, and six with one fault of integration each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from harness import PROJECT, SCRIPTS


@attrs.frozen
class Rehearsed:
    """What the command has said, and what it left in its folder for temporary files."""

    code: int
    document: dict[str, Any]
    screen: str
    left: list[Path]

    def results(self, fault: str) -> dict[str, str]:
        """Return what came of each promise of a fault; `none` is the undisturbed run."""
        [found] = [one for one in self.document["faults"] if one["fault"] == fault]
        return {promise["promise"]: promise["result"] for promise in found["promises"]}


def rehearsed(folder: Path, *words: str, script: str = "") -> Rehearsed:
    """Rehearse the script of these tests, with that fault of its own, in an empty directory."""
    temporary, here = folder / "tmp", folder / "here"
    temporary.mkdir()
    here.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "SLURM_"))}
    env = own | {"PYTHONPATH": str(PROJECT), "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    told = [str(SCRIPTS / "rehearsed.py"), *([script] if script else [])]
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", "rehearse", *words, "--json", "--", *told],
        env=env | {"RESILIENCE_RUN_DIR": str(here / "mine")},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout, done.stderr
    assert list(here.iterdir()) == [], "nothing of the user's is touched"
    return Rehearsed(
        done.returncode, json.loads(done.stdout), done.stderr, list(temporary.glob("resilience-rehearse*"))
    )


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
