"""Accelerate's FSDP on two ranks: saved by parts, killed, resumed; and refused where it is asked for in vain."""

from __future__ import annotations

import json

import pytest
from adapter_frameworks import require

from .harness import job, steps_lost

STEPS, KILLED_AT, SAVED_AT, BATCHES = 40, 38, 35, 32  # of 32 batches of an epoch on each rank
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: "no"
use_cpu: false
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
"""
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def accelerate():
    require("accelerate")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text(CONFIG)
    return str(path)


def trained(folder, config, *args, fault=""):
    """Run the training to its end; return the job, its exit code, and what the ranks told at their ends."""
    folder.mkdir(exist_ok=True)
    words = ("--accelerate-config", config, "accelerate_fsdp.py", str(STEPS), *args)
    with job(folder, *words, env={"RESILIENCE_FAULT": fault}) as run:
        code = run.finish(90.0)
        ends = [json.loads(path.read_text()) for path in run.told("end-*")]
    return run, code, ends


def test_what_is_sharded_is_saved_by_parts_and_resumed(tmp_path, config):
    """Killed in its second epoch, it goes on at the next sample, and comes to the weights of a run without a fault."""
    _, code, plain = trained(tmp_path / "plain", config, "--shard-on-cpu")
    assert code == 0
    run, code, ends = trained(tmp_path / "killed", config, "--shard-on-cpu", fault=f"kill:rank=1,step={KILLED_AT}")
    assert code == 0, run.screen
    assert [end["kinds"] for end in ends] == [["DTensor"], ["DTensor"]]
    [incident] = run.incidents()
    assert incident["kind"] == "crash"
    assert incident["lost_steps"] in steps_lost(KILLED_AT, SAVED_AT)
    starts = [json.loads(path.read_text()) for path in run.told("start-1-*")]
    assert starts == [{"step": SAVED_AT, "epoch": 1, "samples": SAVED_AT * 8}] * 2
    parts = {path.name for path in (run.run_dir / "checkpoints").glob(f"step-{STEPS:08d}/pytorch_model_fsdp_0/*")}
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= parts
    for whole, resumed in zip(plain, ends, strict=True):
        assert resumed["step"] == resumed["after_load"] == STEPS
        assert resumed["seen"] == whole["seen"][SAVED_AT:]
        assert resumed["weights"] == whole["weights"]


def test_fsdp_that_is_not_in_effect_is_refused(tmp_path, config):
    """A configuration asks for it, Accelerate leaves it out on a CPU without a word: the training does not begin."""
    run, code, ends = trained(tmp_path / "refused", config)
    assert code == 77, run.screen
    assert ends == []
    assert "FSDP is asked for" in run.screen
    assert "MULTI_CPU is in effect" in run.screen
