"""The example of the Accelerate adapter, and what Accelerate shards, under both launchers."""

from __future__ import annotations

import json

import pytest
from adapter_frameworks import require
from to_the_end import output_of

from .harness import PROJECT, SCRIPTS
from .test_accelerate_fsdp import CONFIG

pytestmark = pytest.mark.slow
EXAMPLE = PROJECT / "examples" / "accelerate_train.py"
ACCELERATE = ("-m", "accelerate.commands.launch", "--main_process_port=0")  # a free one, beside other tests


def run(folder, *words, fault=""):
    """Run Python in an empty directory, as a user outside of any job; return all output."""
    require("accelerate")
    return output_of(folder, *words, without=("FSDP",), RESILIENCE_FAULT=fault, TOLD=str(folder))


def test_the_example_goes_on_after_a_kill(tmp_path):
    """Under `resilience run` a rank is killed at step 60, and it resumes at 50, where it has saved."""
    launcher = ("-m", "resilience_sdk", "run", "--nproc-per-node=2", "--run-dir=run")
    output = run(tmp_path, *launcher, EXAMPLE, "--steps", 80, fault="kill:rank=1,step=60")
    assert "step-00000050: step 50 is next" in output
    assert f"finished after step 80, {80 * 2 * 2 * 32} samples" in output


@pytest.mark.release
def test_the_example_under_accelerate_launch(tmp_path):
    """Nothing restarts it there; it is recorded all the same, and its end is told."""
    options = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    output = run(tmp_path, *ACCELERATE, *options, EXAMPLE, "--steps", 60)
    assert "finished after step 60" in output
    [found] = (path for path in (tmp_path / "resilience-runs").iterdir() if path.is_dir())
    assert (found / "finished").exists()
    assert (found / "checkpoints" / "step-00000060" / "manifest.json").exists()


def test_what_accelerate_launch_shards(tmp_path):
    """Its `--config_file` asks for FSDP, which is in effect, and is saved by parts."""
    (tmp_path / "fsdp.yaml").write_text(CONFIG)
    run(tmp_path, *ACCELERATE, "--config_file=fsdp.yaml", SCRIPTS / "accelerate_fsdp.py", 6, "--shard-on-cpu")
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-0-*")]
    assert [end["kinds"] for end in ends] == [["DTensor"], ["DTensor"]]
    assert len(list(tmp_path.glob("resilience-runs/*/checkpoints/step-00000006/optimizer_0/*.distcp"))) == 2
