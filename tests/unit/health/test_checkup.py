"""What the probes are told of a job, which there are, and whose processes are the job's; the wait for a rendezvous."""

import json
import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.health import Finding, Status, checkup, preflight, probes
from resilience_sdk.health.checkup import (
    below,
    compute_probes,
    first_of_job,
    for_this_torch,
    gpu_devices,
    job_context,
    probes_for,
    wait_for_rendezvous,
)
from resilience_sdk.health.probes import Context


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
        context({**env, "MASTER_PORT": "http"})


def test_no_secret_reaches_a_probe():
    """They see what changes how a job communicates, and nothing else."""
    told = {"NCCL_ALGO": "Ring", "SLURM_NNODES": "4"}
    secrets = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "SLURM_JWT", "HOME"), "x")
    assert context({**told, **secrets}).environment == told


def test_each_directory_has_a_probe_of_its_own(tmp_path):
    """A mount that hangs must not hide what another one says; one that is named twice is looked at once."""
    told = context({}, run_dir=str(tmp_path), data=["/data/a", "/data/a", str(tmp_path)])
    places = [probe.only for probe in probes_for(told) if probe.name == probes.STORAGE.name]
    assert places == [str(tmp_path), "/data/a"]
    assert context({"RESILIENCE_RUN_DIR": "/runs/a"}, run_dir="/runs/b").run_dir == "/runs/b"
    assert context({"RESILIENCE_RUN_DIR": "/runs/a"}).run_dir == "/runs/a"
    assert context({"SLURM_JOB_ID": "7"}).run_dir.endswith("resilience-runs/slurm-7")  # as the job would get it


def test_each_visible_gpu_has_a_rank_and_computes():
    """Without one, the processor does; a launcher knows how many ranks there are."""
    devices = [f"cuda:{number}" for number in range(gpu_devices())] or ["cpu"]
    for env, computing in (
        ({}, devices),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["cpu"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, devices[:1]),
    ):
        assert [probe.only for probe in compute_probes(env)] == computing
        assert context({**env, "LOCAL_WORLD_SIZE": "many"}).local_ranks == len(computing)
    assert context({"LOCAL_WORLD_SIZE": "8"}).local_ranks == 8


def test_a_rank_is_judged_by_its_launchers_settings(tmp_path, monkeypatch):
    """As `start_run` takes them."""
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(Settings(dump_signal="SIGUSR1").to_json()))
    monkeypatch.setenv("RESILIENCE_INTERNAL_SETTINGS", str(file))
    report = preflight(tmp_path, limit_s=0.01)  # what the probes of this machine say is not asked here
    (found,) = [finding for finding in report.findings if finding.check == "signal"]
    assert found.subject == "SIGUSR1"


def test_the_table_has_what_the_probes_tell_and_nothing_else():
    """A name that is not there would be noticed only on the node on which something is wrong."""
    sources = "".join(path.read_text() for path in Path(probes.__file__).parent.glob("*.py"))
    told = re.findall(r'\b(device|[A-Z]+)\.found\(\s*"(\w+)"', sources)
    assert {(name.lower().replace("device", "gpu"), check) for name, check in told} <= {
        (name, check) for name, probe in probes.PROBES.items() for check in probe.checks
    }
    assert len(told) > 50
    unused = {check for probe in probes.PROBES.values() for check in probe.checks if f'"{check}"' not in sources}
    assert unused == set()


@pytest.mark.parametrize(("same", "stops"), [({"cuda": None}, False), ({"cuda": "12.8"}, True), ({}, True)])
def test_no_gpu_stops_a_job_whose_torch_cannot_use_one(same, stops):
    """It is told nevertheless."""
    found = [
        Finding(probe="gpu", check="driver", status="failed", must=True),
        Finding(probe="software", check="torch", status="ok", must=True, data={"same": same}),
    ]
    gpu, torch = for_this_torch(found)
    assert (gpu.stops, gpu.status, torch.must) == (stops, Status.FAILED, True)


@pytest.mark.parametrize(
    ("nodes", "env", "elsewhere", "ranks"),
    [
        (None, {}, False, 4),
        (None, {"SLURM_NNODES": "3"}, True, 12),
        (1, {"SLURM_NNODES": "3"}, False, 4),  # a job on one node of an allocation of three
        (2, {}, True, 8),
        (2, {"SLURM_NNODES": "1"}, True, 8),
    ],
)
def test_the_launcher_knows_better_than_variables(nodes, env, elsewhere, ranks):
    """Where there is one."""
    context = Context(nodes=nodes, environment=env, local_ranks=4)
    assert (context.has_nodes_elsewhere, context.world_size) == (elsewhere, ranks)


# A shell (10) has a launcher (20) with a wrapper script (30) of a rank (31), another rank (40) with a worker (41), and
# beside it somebody else's program (50).
PARENTS = {1: 0, 10: 1, 20: 10, 30: 20, 31: 30, 40: 20, 41: 40, 50: 10}


@pytest.mark.parametrize(
    ("pid", "first", "job"),
    [(31, 20, {20, 30, 31, 40, 41}), (40, 20, {20, 30, 31, 40, 41}), (50, 50, {50}), (41, 41, {41})],
)
def test_a_job_begins_with_who_started_its_ranks(pid, first, job):
    """A wrapper is not yet the launcher; who is no rank has only what it started itself."""
    assert first_of_job(pid, PARENTS, {30, 31, 40}.__contains__) == first
    assert below(first, PARENTS) == job


@pytest.mark.parametrize("parents", [{7: 1}, {}], ids=["launcher is gone", "no process table"])
def test_a_rank_of_nobody_stands_alone(parents):
    """The others of init are not of its job."""
    assert first_of_job(7, parents, lambda _: True) == 7


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 12)))
def test_a_table_that_was_read_while_it_changed_is_no_endless_loop(parents):
    """A number may have been used again in between, so that a process seems to be its own ancestor."""
    assert 5 in below(5, parents)
    assert first_of_job(5, parents, lambda _: True) > 0


UNKNOWN = Finding(probe="rendezvous", check="resolves", subject="node-0", status="failed", must=True, evidence="none")
SILENT = Finding(probe="rendezvous", check="reach", subject="node-0:1", status="failed", must=True, evidence="no route")
THERE = Finding(probe="rendezvous", check="resolves", subject="node-0", status="ok", must=True)
OTHER = Finding(probe="host", check="load", status="degraded")


@pytest.fixture
def wait(monkeypatch):
    """Wait with these looks; return what was found, what was said, and how many looks were left."""
    said = []
    monkeypatch.setattr(checkup, "say", said.append)

    def wait(findings, looks=(), limit_s=60.0):
        looks = list(looks)
        return wait_for_rendezvous(findings, lambda: looks.pop(0), limit_s, again_s=0.0), said, len(looks)

    return wait


def test_a_rendezvous_is_waited_for(wait):
    """First its name comes, then its node; that it is waited for is said once. At the end it is told as it is."""
    found, said, left = wait([OTHER, UNKNOWN], [[UNKNOWN], [SILENT], [THERE], [UNKNOWN]])
    assert (found, left) == ([OTHER, THERE], 1)
    assert said == ["preflight: node-0 is not there yet (none); trying again for up to 60 s"]
    found, _, _ = wait([OTHER, SILENT], [[SILENT]] * 10_000, limit_s=0.001)
    assert (found, len(said)) == ([OTHER, SILENT], 2)


@pytest.mark.parametrize(
    "found",
    [
        [THERE],
        [attrs.evolve(UNKNOWN, check="own_name")],
        [UNKNOWN, Finding(probe="gpu", check="answers", status="failed", must=True)],
        [attrs.evolve(UNKNOWN, data={"addresses": ["127.0.1.1"]})],
    ],
)
def test_what_time_does_not_cure_is_not_waited_for(wait, found):
    """Nothing is missing, or something else has to be cured first."""
    assert wait(found) == (found, [], 0)
