"""Run directories of an earlier version (see tests/old_runs/README.md) are gone on from, in each way in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_frameworks import require
from harness import PROJECT

from resilience_sdk.checkpoint.manifest import decode_manifest
from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.resume_proof import NOT_COMPARED, STATE

OLD = PROJECT / "tests" / "old_runs"
SAVED, LAST = 4, 8
FRAMEWORKS = {
    "start_run": "torch",
    "checkpointer": "torchdata",
    "lightning": "lightning",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "megatron": "megatron.core",
}


def copied(way: str, folder: Path) -> Path:
    """Return a copy of an old directory, which nobody else may write."""
    run = folder / "run"
    shutil.copytree(OLD / way, run)
    for path in (run, *run.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return run


def resumed(way: str, run: Path) -> tuple[dict[str, Any], str]:
    """Resume it with the version of today; return what the loop told, and the screen."""
    command = [sys.executable, str(OLD / "loops.py"), way, str(run)]
    env = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "HOME": str(run.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=run.parent, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.parametrize("way", FRAMEWORKS)
def test_they_have_no_digests(way: str) -> None:
    """So they are what they are said to be."""
    for path in (OLD / way).rglob("manifest.json"):
        manifest = decode_manifest(path.read_bytes())
        assert not manifest.digests
        assert manifest.step in (2, SAVED)
    assert sum(path.stat().st_size for path in (OLD / way).rglob("*")) < 256 << 10


def check(way: str, folder: Path) -> str:
    """Resume a copy: at the step of its save, with its weights, to the end; what is missing is said, no error."""
    require(FRAMEWORKS[way])
    run = copied(way, folder)
    expected = json.loads((run / "expected.json").read_text())
    told, screen = resumed(way, run)
    assert (expected["saved"], told["first"], told["last"]) == (SAVED, SAVED, LAST)
    assert told["weights"] == expected["weights"]
    assert "Traceback" not in screen
    if way != "transformers":
        events = read_journal(run / "journal").events
        [resume] = [event for event in events if event["event"] == "resume"]
        assert resume["step"] == SAVED
        names = ("resume_check", "resume_not_exact")
        compared = [event for event in events if event["event"] in names and event["what"] == STATE]
        assert {event["result"] for event in compared} == {NOT_COMPARED}
        assert all("no digests, as those of an earlier version" in event["text"] for event in compared)
    return screen


@pytest.mark.slow
@pytest.mark.parametrize("way", ["start_run", "checkpointer"])
def test_a_loop_of_ones_own_goes_on(way: str, tmp_path: Path) -> None:
    """With its weights, from its step."""
    check(way, tmp_path)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("way", ["lightning", "transformers", "accelerate", "deepspeed", "megatron"])
def test_a_loop_of_a_framework_goes_on(way: str, tmp_path: Path) -> None:
    """With its weights, from its step."""
    check(way, tmp_path)
