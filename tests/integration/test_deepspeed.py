"""DeepSpeed beside the contract: the example as its first lines say, and its checkpoint for DeepSpeed's own tool."""

from __future__ import annotations

import subprocess
import sys

import pytest
from adapter_frameworks import require
from harness import PROJECT, steps_lost
from to_the_end import output_of

from resilience_sdk.incidents import IncidentStore

KILLED_AT, SAVED_AT = 70, 50


@pytest.mark.release
@pytest.mark.slow
def test_the_example_goes_on_behind_a_kill(tmp_path):
    """With ZeRO 3 and Adam; and the plain weights can be taken out of the checkpoint, as from DeepSpeed's own."""
    require("deepspeed", "--no-build-isolation deepspeed==0.19.8")
    output = output_of(
        tmp_path,
        *("-m", "resilience_sdk", "run", "--nproc-per-node=2", f"--run-dir={tmp_path / 'run'}"),
        *(str(PROJECT / "examples" / "deepspeed_train.py"), "--steps", "80", "--stage", "3"),
        CUDA_VISIBLE_DEVICES="",
        RESILIENCE_FAULT=f"kill:rank=1,step={KILLED_AT}",
    )
    assert f"step {SAVED_AT} is next" in output
    assert "finished after step 80" in output
    [incident] = IncidentStore(tmp_path / "run").all()
    assert [culprit.rank for culprit in incident.culprits] == [1]
    assert incident.lost_steps in steps_lost(KILLED_AT, SAVED_AT)
    saved = tmp_path / "run" / "checkpoints" / "step-00000080"
    command = [sys.executable, str(saved / "zero_to_fp32.py"), str(saved), str(tmp_path / "plain")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert list((tmp_path / "plain").iterdir())
