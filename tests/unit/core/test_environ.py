"""Who a process is, by the variables of its launcher."""

from __future__ import annotations

import pytest

from resilience_sdk.core import environ
from resilience_sdk.rank.identity import fallback_job_key


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "3"}, (3, 4)),
        ({"RANK": "3", "WORLD_SIZE": "x"}, (3, 4)),
        ({"RANK": "3", "WORLD_SIZE": "2"}, (3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "8"}, (1, 8)),
    ],
)
def test_the_world_holds_the_rank(env, expected):
    """A rank without the size of its world is in one of at least its own number: its page would be refused else."""
    identity = environ.rank_identity(env)
    assert (identity.rank, identity.world_size) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"SLURM_PROCID": "1", "SLURM_NNODES": "2"}, True),
        ({"SLURM_PROCID": "1", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"}, False),
        ({"SLURM_NNODES": "2"}, False),
        ({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": "2"}, False),
    ],
)
def test_whether_a_job_has_several_nodes_is_told_by_its_launcher(env, expected):
    """The innermost launcher decides: torchrun inside a Slurm job, a step inside an allocation."""
    assert environ.has_several_nodes(env) is expected


LIGHTNING = {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1234"}


def test_ranks_that_lightning_started_itself_are_known():
    """It tells each its number on the node; of other nodes the number alone does not tell the rank."""
    for number in ("0", "1"):
        identity = environ.rank_identity({**LIGHTNING, "LOCAL_RANK": number})
        assert (identity.rank, identity.local_rank, identity.world_size) == (int(number), int(number), 2)
    assert environ.rank_identity({**LIGHTNING, "NODE_RANK": "1", "LOCAL_RANK": "1"}) is None
    assert environ.lightning_local_rank({**LIGHTNING, "LOCAL_RANK": "1", "RANK": "1"}) is None


def test_they_are_of_the_job_of_the_process_that_started_them(monkeypatch):
    """It is rank 0 itself, before it has started them and afterwards."""
    monkeypatch.setattr("os.getpid", lambda: 4)
    monkeypatch.setattr("os.getppid", lambda: 3)
    before, first = fallback_job_key({}), fallback_job_key({**LIGHTNING, "LOCAL_RANK": "0"})
    monkeypatch.setattr("os.getpid", lambda: 5)
    monkeypatch.setattr("os.getppid", lambda: 4)
    assert before == first == fallback_job_key({**LIGHTNING, "LOCAL_RANK": "1"})


def test_what_is_outside_of_jobs_has_nothing_of_the_launcher_around_it():
    """A job that is started within another one is its own; the user's settings stay."""
    kept = {"PATH": "/bin", "RESILIENCE_CHECKPOINT_EVERY": "5", "MY_RANK": "1"}
    others = ("RANK", "MASTER_PORT", "SLURM_JOB_ID", "PET_NNODES", "TORCHELASTIC_RUN_ID", environ.INTERNAL_JOB)
    assert environ.outside_of_jobs({**kept, **dict.fromkeys(others, "1")}) == kept
