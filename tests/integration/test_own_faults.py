"""An installation of the SDK that is not whole: what it cannot look at is told as its own fault, not as the node's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, job

from resilience_sdk.system import installation

_DAMAGE = {
    # before the probe of any process begins, and in one of them when it does
    "health/probe_main.py": {"gpu", "host", "kernel", "processes", "network", "rendezvous", "storage", "software"},
    "health/gpu.py": {"gpu"},
}


@pytest.fixture(params=_DAMAGE)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, set[str]]:
    """A copy of the package in which a file fails to import what it needs, and the probes that this concerns."""
    root = tmp_path / "damaged"
    shutil.copytree(installation.PACKAGE, root / "resilience_sdk", ignore=shutil.ignore_patterns("__pycache__"))
    file = root / "resilience_sdk" / request.param
    # Who starts the processes imports it, too, and is to find nothing wrong.
    guard = "import sys\nif sys.flags.no_site:\n    import resilience_sdk.lost_module\n"
    text = file.read_text()
    file.write_text(
        text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{guard}")
    )
    return root, _DAMAGE[request.param]


def run(root: Path, where: Path, *words: str | Path) -> tuple[int, str, str]:
    """Run a command of the damaged copy in a directory where nothing of ours is."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "resilience_sdk", *map(str, words)]
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_the_doctor_says_so(damaged: tuple[Path, set[str]], tmp_path: Path) -> None:
    """In one line for all probes alike, with a cure that is about the installation; the node is not refused."""
    root, blind = damaged
    code, out, err = run(root, tmp_path, "doctor", "--patience", "10", "--run-dir", tmp_path / "run")
    assert code == 0, out + err
    assert "nothing that was seen stands against a job, but not all could be looked at" in out.splitlines()[0]
    (line,) = [line for line in out.splitlines() if "a fault of the SDK, not of this node" in line]
    assert "ModuleNotFoundError: No module named 'resilience_sdk.lost_module'" in line
    assert "install it again with pip" in line
    assert all(probe in line.partition(": ")[0] for probe in blind)
    assert "FAILED" not in out
    code, out, err = run(root, tmp_path, "doctor", "--json", "--patience", "10", "--run-dir", tmp_path / "run")
    own = [finding for finding in json.loads(out)["findings"] if finding["data"].get("own_fault")]
    assert {finding["probe"] for finding in own} == blind
    assert all((finding["check"], finding["status"]) == ("probe", "unavailable") for finding in own)


@pytest.mark.slow
def test_a_preflight_and_a_watch_say_so_and_the_job_runs(damaged: tuple[Path, set[str]], tmp_path: Path) -> None:
    """One line of each, and no word of health in the journal that would blame the node."""
    root, blind = damaged
    until = tmp_path / "until"
    words = (
        "--preflight",
        "--health-interval",
        "1",
        "--nproc-per-node",
        "1",
        SCRIPTS / "training.py",
        "--until",
        until,
    )
    with job(tmp_path, *map(str, words), env={"PYTHONPATH": str(root)}, fresh=True) as run:
        told = run.wait_event("degraded", what="health")
        until.touch()
        assert run.finish() == 0, run.screen
        (before,) = run.events("degraded", what="preflight")
        assert len(told) == 1
        lines = [line for line in run.screen.splitlines() if "a fault of the SDK, not of this node" in line]
        assert len(lines) == 2
        assert all("install it again with pip" in line for line in lines)
        assert "gpu" in before["why"].partition(": ")[0]
        assert not [event for event in run.events("health") if event["probe"] in blind]
