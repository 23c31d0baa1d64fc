"""How many nodes and ranks a job has."""

import pytest

from resilience_sdk.health.job import has_nodes_elsewhere, world_size
from resilience_sdk.health.probes import Context


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
    assert (has_nodes_elsewhere(context), world_size(context)) == (elsewhere, ranks)
