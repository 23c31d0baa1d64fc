"""Whether the timeouts around a job go off in the right order."""

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.software import timeouts
from resilience_sdk.settings import Settings

NOW = 1_000_000.0


def subjects(settings, env=None, has_gpus=True):
    """Return the pairs in the wrong order."""
    found = list(timeouts.order(settings, env or {}, has_gpus=has_gpus, now_unix=NOW))
    assert all(bool(finding.cure) is (finding.status is Status.DEGRADED) for finding in found)
    return [finding.subject for finding in found if finding.status is not Status.OK]


def test_the_defaults_are_in_order():
    """Anywhere: alone, under torchrun and under Slurm."""
    for env in ({}, {"TORCHELASTIC_RUN_ID": "x"}, {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(NOW + 7200)}):
        assert subjects(Settings(), env) == []


@pytest.mark.parametrize(
    ("seconds", "has_gpus", "is_late"), [(599, True, False), (600, True, True), (600, False, False)]
)
def test_a_deadline_must_end_before_the_process_group_does(seconds, has_gpus, is_late):
    """Torch gives NCCL ten minutes and gloo thirty, and names nobody."""
    found = subjects(Settings(heartbeat_timeout=seconds), has_gpus=has_gpus)
    assert found == (["heartbeat_timeout"] if is_late else [])


def test_sections_are_named():
    """Each has its own deadline."""
    assert subjects(Settings(section_timeouts={"eval": 3600, "fwd": 60})) == ["section_timeouts eval"]


@pytest.mark.parametrize(
    ("env", "is_early"),
    [
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, True),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "TORCH_NCCL_ENABLE_MONITORING": "0"}, False),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "900"}, False),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "soon"}, False),
    ],
)
def test_the_watchdog_of_nccl_may_abort_first(env, is_early):
    """Only where somebody set it so."""
    assert subjects(Settings(heartbeat_timeout=300), env) == (["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] if is_early else [])


@pytest.mark.parametrize(
    ("env", "is_late"),
    [({"NCCL_IB_TIMEOUT": "22"}, False), ({"NCCL_IB_TIMEOUT": "25"}, True), ({"NCCL_IB_RETRY_CNT": "200"}, True)],
)
def test_infiniband_must_give_up_before_nccl(env, is_late):
    """4.096 us * 2^22 * 7 are two minutes, with 25 it is a quarter of an hour."""
    assert subjects(Settings(), env) == (["NCCL_IB_TIMEOUT"] if is_late else [])


def test_the_job_must_outlast_its_deadlines():
    """Else the scheduler's end is taken for their cause."""
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(NOW + 300)}
    assert subjects(Settings(heartbeat_timeout=200), env) == []
    assert subjects(Settings(heartbeat_timeout=400, preempt_time=500), env) == ["heartbeat_timeout", "preempt_time"]


def test_grace_must_fit_into_the_schedulers():
    """Slurm kills thirty seconds after it has asked."""
    settings = Settings(term_grace=60)
    assert subjects(settings, {"SLURM_JOB_ID": "1"}) == ["term_grace"]
    assert subjects(settings) == []


def test_torchrun_gives_thirty_seconds():
    """Whoever asks for more by name is told; under our own launcher it is ours to give."""
    settings = Settings(preempt_time=120)
    assert subjects(settings, {"TORCHELASTIC_RUN_ID": "x"}) == ["preempt_time"]
    assert subjects(settings, {"TORCHELASTIC_RUN_ID": "x", "RESILIENCE_INTERNAL_JOB": "j"}) == []
