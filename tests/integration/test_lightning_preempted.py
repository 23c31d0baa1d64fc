"""A Lightning training on two gloo ranks is asked to leave: by a signal to one rank, to the other, to both."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
FOREVER = 10_000_000
ROUNDS = 3
TARGETS = ((0,), (1,), (0, 1))


@pytest.fixture(autouse=True)
def frameworks():
    """What all of these need."""
    require("lightning.pytorch", "lightning")
    require("torchdata")


def told(folder, name):
    path = folder / "told" / name
    return json.loads(path.read_text()) if path.exists() else None


def forget(folder):
    for path in folder.glob("told/*"):
        path.unlink()


def is_under_way(folder):
    """Both ranks have made some steps of this attempt."""
    starts, steps = ([told(folder, f"{name}-{rank}") for rank in (0, 1)] for name in ("start", "step"))
    return (
        all(starts)
        and all(steps)
        and all(now["step"] >= start["step"] + 5 for start, now in zip(starts, steps, strict=True))
    )


def leave(folder, ranks, command=None):
    """Run until both ranks train, send SIGTERM to `ranks`; return where it began and stopped, and the exit code."""
    forget(folder)
    args = ("--nproc-per-node", "2", "lightning_preempted.py", str(FOREVER))
    with job(folder, *args, command=command) as run:
        run.wait(lambda: is_under_way(folder), "both ranks to train")
        for rank in ranks:
            os.kill(told(folder, f"start-{rank}")["pid"], signal.SIGTERM)
        code = run.finish(30.0)
        starts, steps = ([told(folder, f"{name}-{rank}")["step"] for rank in (0, 1)] for name in ("start", "step"))
        assert starts[0] == starts[1]
        # Lightning's module hears of the last batch after the callback that has left behind it.
        assert steps[0] == steps[1], run.screen
        return starts[0], steps[0] + 1, code, run.screen


def run_to(folder, steps):
    """Run to the end; return the digest that both ranks have come to."""
    forget(folder)
    with job(folder, "--nproc-per-node", "2", "lightning_preempted.py", str(steps)) as run:
        assert run.finish() == 0, run.screen
        assert (run.run_dir / "finished").exists()
        [digest] = {told(folder, f"end-{rank}")["digest"] for rank in (0, 1)}
        return digest


def test_signals_to_any_rank_stop_all_behind_one_step_and_the_resume_is_bit_equal(tmp_path):
    """Each ends with 75, saved, and the next start goes on at the very step; the end is that of a run undisturbed."""
    (tmp_path / "asked").mkdir()
    (tmp_path / "undisturbed").mkdir()
    at = 0
    for ranks in TARGETS * ROUNDS:
        began, stopped, code, screen = leave(tmp_path / "asked", ranks)
        assert (code, began) == (75, at), screen
        assert f"step-{stopped:08d}" in os.listdir(tmp_path / "asked" / "run" / "checkpoints"), screen
        at = stopped
    assert run_to(tmp_path / "asked", at + 10) == run_to(tmp_path / "undisturbed", at + 10)


def test_under_torchrun_a_signal_to_one_rank_stops_both(tmp_path):
    """The launcher's own exit code tells less; what stands in the run directory tells all."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    _, stopped, code, screen = leave(tmp_path, (1,), command)
    assert code != 0
    assert f"step-{stopped:08d}" in os.listdir(tmp_path / "run" / "checkpoints"), screen
    assert not (tmp_path / "run" / "finished").exists()
