"""What the probes are told of a job, and which there are."""

import json

import pytest

from resilience_sdk.errors import ConfigError
from resilience_sdk.health import Finding, Status, preflight, probes
from resilience_sdk.health.checkup import compute_probes, for_this_torch, gpu_devices, job_context, probes_for
from resilience_sdk.settings import Settings


def context(env, **more):
    """Return what the probes of a job in that environment are told."""
    return job_context(env, Settings(), **more)


def test_the_rendezvous_is_what_a_launcher_says():
    """Or what was named; on one node there is none."""
    env = {"MASTER_ADDR": "node-1", "MASTER_PORT": "1234"}
    assert context(env).rendezvous == "node-1:1234"
    assert context(env, rendezvous="node-2:99").rendezvous == "node-2:99"
    assert context({}).rendezvous is None
    with pytest.raises(ConfigError, match="node-1:http"):
        context({"MASTER_ADDR": "node-1", "MASTER_PORT": "http"})


def test_no_secret_reaches_a_probe():
    """They see what changes how a job communicates, and nothing else."""
    env = {
        "NCCL_ALGO": "Ring",
        "SLURM_NNODES": "4",
        "AWS_SECRET_ACCESS_KEY": "x",
        "WANDB_API_KEY": "x",
        "SLURM_JWT": "x",
        "HOME": "/root",
    }
    assert set(context(env).environment) == {"NCCL_ALGO", "SLURM_NNODES"}


def test_each_directory_has_a_probe_of_its_own(tmp_path):
    """A mount that hangs must not hide what another one says; one that is named twice is looked at once."""
    told = context({}, run_dir=str(tmp_path), data=["/data/a", "/data/a", str(tmp_path)])
    places = [probe.only for probe in probes_for(told) if probe.name == probes.STORAGE.name]
    assert places == [str(tmp_path), "/data/a"]


def test_the_run_directory_is_the_jobs():
    """Under a scheduler the one that it would get."""
    assert context({"SLURM_JOB_ID": "7"}).run_dir.endswith("resilience-runs/slurm-7")
    assert context({"RESILIENCE_RUN_DIR": "/runs/a"}).run_dir == "/runs/a"
    assert context({"RESILIENCE_RUN_DIR": "/runs/a"}, run_dir="/runs/b").run_dir == "/runs/b"


@pytest.mark.parametrize(
    ("env", "ranks"), [({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": "many"}, None), ({}, None)]
)
def test_local_ranks_are_the_launchers_or_one_for_each_gpu(env, ranks):
    """And never none."""
    assert context(env).local_ranks == (ranks or max(1, gpu_devices()))


def test_each_visible_gpu_computes():
    """Without one, the processor does."""
    count = gpu_devices()
    usual = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    assert [probe.only for probe in compute_probes({})] == usual
    assert [probe.only for probe in compute_probes({"CUDA_VISIBLE_DEVICES": ""})] == ["cpu"]
    assert [probe.only for probe in compute_probes({"CUDA_VISIBLE_DEVICES": "0"})] == usual[:1]


def test_a_rank_is_judged_by_its_launchers_settings(tmp_path, monkeypatch):
    """As `start_run` takes them."""
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(Settings(dump_signal="SIGUSR1").to_json()))
    monkeypatch.setenv("RESILIENCE_INTERNAL_SETTINGS", str(file))
    report = preflight(tmp_path, limit_s=0.01)  # what the probes of this machine say is not asked here
    (found,) = [finding for finding in report.findings if finding.check == "signal"]
    assert found.subject == "SIGUSR1"


@pytest.mark.parametrize(("same", "stops"), [({"cuda": None}, False), ({"cuda": "12.8"}, True), ({}, True)])
def test_no_gpu_stops_a_job_whose_torch_cannot_use_one(same, stops):
    """It is told nevertheless."""
    found = [
        Finding(probe="gpu", check="driver", status="failed", must=True),
        Finding(probe="software", check="torch", status="ok", must=True, data={"same": same}),
    ]
    gpu, torch = for_this_torch(found)
    assert (gpu.stops, gpu.status, torch.must) == (stops, Status.FAILED, True)
