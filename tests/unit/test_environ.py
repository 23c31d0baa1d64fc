"""Who a process is, by the variables of its launcher."""

from __future__ import annotations

import pytest

from resilience_sdk import environ


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
