"""The examples run as their first lines say."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from harness import steps_lost
from to_the_end import output_of

from resilience_sdk.incidents import IncidentStore

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(tmp_path: Path, *command: str, fault: str = "") -> str:
    """Run Python in an empty directory, as a user outside of any job; return all output."""
    return output_of(tmp_path, *command, CUDA_VISIBLE_DEVICES="", RESILIENCE_FAULT=fault)


def exits(run_dir: Path) -> list[dict[str, Any]]:
    """Return what the journal says of the ends of ranks, in their order."""
    lines = [
        json.loads(line) for path in run_dir.glob("journal/*-launcher-*") for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line["event"] == "rank_exit"]


def launched(tmp_path: Path, script: str, fault: str) -> str:
    """Run an example on two ranks under our launcher."""
    launcher = ["-m", "resilience_sdk", "run", "--nproc-per-node=2", f"--run-dir={tmp_path / 'run'}"]
    return run(tmp_path, *launcher, str(EXAMPLES / script), fault=fault)


def test_plain_loop(tmp_path: Path) -> None:
    """Tier 1 alone: it trains, and leaves a journal and no incident."""
    assert "final loss" in run(tmp_path, str(EXAMPLES / "plain_loop.py"))
    [run_dir] = (path for path in (tmp_path / "resilience-runs").iterdir() if path.is_dir())
    assert list((run_dir / "journal").glob("*.jsonl"))
    assert IncidentStore(run_dir).all() == []


@pytest.mark.slow
def test_full_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Tier 2: killed at step 70, it resumes at 60 (it saves every 20)."""
    output = launched(tmp_path, "full_run.py", "kill:rank=1,step=70")
    assert "step 60 is next" in output
    assert "best loss" in output
    [incident] = IncidentStore(tmp_path / "run").all()
    assert [culprit.rank for culprit in incident.culprits] == [1]
    assert incident.lost_steps in steps_lost(70, 60)
    assert [exit["step"] for exit in exits(tmp_path / "run")][-2:] == [79, 79]


@pytest.mark.slow
def test_unchanged_script_is_restarted(tmp_path: Path) -> None:
    """Tier 3: a script that knows nothing of the SDK is killed, the rank is named, and it starts over."""
    output = launched(tmp_path, "unchanged_ddp.py", "kill:rank=1,step=30")
    assert output.count("step  0") == 2
    assert "final loss" in output
    [incident] = IncidentStore(tmp_path / "run").all()
    assert [culprit.rank for culprit in incident.culprits] == [1]
    assert incident.lost_steps is None


@pytest.mark.parametrize(("script", "uses_it"), [("unchanged_ddp.py", False), ("plain_loop.py", True)])
def test_tier_three_imports_nothing_of_ours(script: str, uses_it: bool) -> None:
    """That is what it is there to show."""
    names = {
        name
        for node in ast.walk(ast.parse((EXAMPLES / script).read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert any(str(name).startswith("resilience_sdk") for name in names) == uses_it
