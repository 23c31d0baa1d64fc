"""The adapter of plain PyTorch with all that PyTorch wraps a model in; the rest of it is in adapters_contract."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import job

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pytorch_attach.py"
STEPS, MICRO_BATCHES = 6, 3  # as in scripts/adapter_pytorch_modes.py

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """What was counted on each rank: [{way: {block: passes}}]."""
    folder = tmp_path_factory.mktemp("modes")
    with job(folder, "--nproc-per-node", "2", "adapter_pytorch_modes.py") as run:
        assert run.finish(90.0) == 0, run.screen
        assert run.incidents() == []
        assert "resilience: attach" not in run.screen
        return [json.loads(path.read_text()) for path in run.told("counts-0-[01]")]


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "compiled", "compiled in place"])
def test_beats_are_real_steps_whatever_wraps_the_model(counts, way):
    """With accumulated gradients: a beat per optimizer step, a forward and a backward per micro-batch."""
    passes = STEPS * MICRO_BATCHES
    assert len(counts) == 2
    for rank in counts:
        found = rank[way]
        assert (found["handle"], found["step"], found["optim"]) == (STEPS, STEPS, STEPS)
        assert (found["fwd"], found["bwd"], found["data"]) == (passes, passes, passes + 1)


@pytest.mark.parametrize("also", [(), ("--loader",)])
def test_an_evaluation_behind_micro_batches_that_made_no_step_is_no_hang(tmp_path, also):
    """It takes three times as long as a step may, on all ranks."""
    env = {"SECONDS": "3", "RESILIENCE_HEARTBEAT_TIMEOUT": "1"}
    with job(tmp_path, "--nproc-per-node", "2", "adapter_pytorch_evaluating.py", *also, env=env) as run:
        assert run.finish(90.0) == 0, run.screen
        assert run.incidents() == []
        assert [json.loads(path.read_text()) for path in run.told("steps-0-[01]")] == [{"steps": 4}] * 2


def start(tmp_path, *command, **env):
    """Start the example in an empty directory, as a user does outside of any job."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "SLURM_"))}
    own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=own | env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process):
    """Wait for its end and return all that it printed."""
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    return printed


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RESILIENCE_RUN = ("-m", "resilience_sdk", "run", "--nproc-per-node=2", "--run-dir=runs/letters")


def test_the_example_goes_on_under_another_launcher_and_another_number_of_ranks(tmp_path):
    """`python`, then `torchrun`: the same run directory, the very next step."""
    assert "finished after step 20" in finished(start(tmp_path, str(EXAMPLE), "--steps=20"))
    second = finished(start(tmp_path, *TORCHRUN, str(EXAMPLE), "--steps=40"))
    assert "step 20 is next" in second
    assert "finished after step 40" in second


def test_the_example_survives_a_killed_rank(tmp_path):
    """Under `resilience run` it starts again by itself, from its checkpoint."""
    printed = finished(
        start(tmp_path, *RESILIENCE_RUN, str(EXAMPLE), "--steps=40", RESILIENCE_FAULT="kill:rank=1,step=30")
    )
    assert "rank 1 on" in printed
    assert "step 20 is next" in printed
    assert "finished after step 40" in printed


def test_alone_it_leaves_behind_a_whole_step_when_it_is_asked_to(tmp_path):
    """SIGTERM to a single process under no launcher at all: it saves, leaves with 75, and goes on at the next step."""
    process = start(tmp_path, str(EXAMPLE), "--steps=20000")
    for line in process.stdout:
        if line.startswith("step  20"):
            break
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 75, rest
    [saved] = sorted((tmp_path / "runs/letters/checkpoints").glob("step-*"))[-1:]
    step = int(saved.name.removeprefix("step-"))
    again = finished(start(tmp_path, str(EXAMPLE), f"--steps={step + 1}"))
    assert f"step {step} is next" in again
    assert f"finished after step {step + 1}" in again
