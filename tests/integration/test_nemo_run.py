"""The plugins of NeMo-Run with the package itself: a local task, and one that a real Slurm runs.

`nemo_run` is none of the test extra: it brings clients of clouds, and release 0.11.1 does not import with the newest
`leptonai` (`pip install nemo_run leptonai==0.26.6` does). So these tests are skipped where it is missing; those of
`tests/unit/adapters/test_nemo_run_plugins.py` hold the interface.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from adapter_frameworks import require
from harness import PROJECT, SCRIPTS
from slurm_cluster import cluster, why_not

pytest.importorskip(
    "nemo_run", reason="nemo_run is not installed: pip install nemo_run leptonai==0.26.6", exc_type=ImportError
)
pytestmark = [pytest.mark.slow, pytest.mark.release]


@pytest.fixture
def env(tmp_path):
    """The environment of who submits, and of the job."""
    require("lightning.pytorch", "lightning")
    (tmp_path / "told").mkdir()
    paths = [PROJECT, SCRIPTS, *filter(None, sys.path)]
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "NEMORUN_HOME": str(tmp_path / "nemo"),
        "PYTHONPATH": ":".join(map(str, paths)),
        "TOLD": str(tmp_path / "told"),
        "RESILIENCE_PAGE_DIR": str(tmp_path),
    }


def submit(env, where, folder):
    words = [sys.executable, str(SCRIPTS / "nemo_recipe.py"), where, str(folder)]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def told(folder, name):
    return json.loads((folder / "told" / name).read_text())


def test_a_local_task_is_restarted_by_our_launcher(tmp_path, env):
    """Two ranks, of which one dies; both callbacks are in the trainer, before those that it had."""
    screen = submit(env, "local", tmp_path)
    assert "starting the ranks again (restart 1 of 3)" in screen
    for rank in (0, 1):
        end = told(tmp_path, f"end-{rank}")
        assert end["step"] == 12
        assert {"FaultToleranceCallback", "PreemptionCallback", "ModelCheckpoint"} <= set(end["callbacks"])


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_job_of_slurm_that_is_preempted_comes_back_and_finishes(tmp_path, env):
    """On the signal that Slurm sends a minute before the time is up all ranks save; the requeued job goes on there."""
    with cluster() as slurm:
        submit({**slurm.env, **env, "PATH": f"{env['PATH']}:/usr/sbin"}, "slurm", tmp_path)
        [number] = map(int, slurm.run("squeue", "--noheader", "--format=%i").split())
        [script] = tmp_path.glob("nemo/experiments/*/*/*_sbatch.sh")
        assert "#SBATCH --signal=TERM@60" in script.read_text()

        def logs():
            return "\n".join(
                path.read_text(errors="replace")[-4000:] for path in tmp_path.glob("nemo/experiments/**/*.out")
            )

        slurm.wait(lambda: len(list(tmp_path.glob("told/step-*"))) == 2, logs)
        slurm.run("scancel", "--signal=TERM", str(number))
        over = slurm.wait_over(number, logs)
        assert over["JobState"] == "COMPLETED", logs()
        assert over["Restarts"] == "1"
        assert over["ExitCode"] == "0:0"
        saved = re.search(r"saved after step (\d+)", logs())
        assert saved, logs()
    for rank in (0, 1):
        assert told(tmp_path, f"end-{rank}")["step"] == 600
        assert told(tmp_path, f"start-{rank}")["step"] == int(saved[1])
