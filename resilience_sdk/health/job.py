"""The shape of a job: what its launcher says, else its variables. Pure."""

from __future__ import annotations

from resilience_sdk.environ import has_several_nodes
from resilience_sdk.health.probes import Context


def world_size(context: Context) -> int:
    """Return how many ranks the job has, as far as that is known; at least those of this node."""
    if context.nodes is not None:
        return context.nodes * context.local_ranks
    env = context.environment
    nodes = _count(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES")))
    return max(_count(env.get("WORLD_SIZE")), _count(env.get("SLURM_NTASKS")), nodes * context.local_ranks)


def has_nodes_elsewhere(context: Context) -> bool:
    """Tell whether the job has ranks on other nodes; False where nothing says so."""
    if context.nodes is not None:
        return context.nodes > 1
    env = context.environment
    # A batch script has no rank yet, and stands for the whole allocation.
    nodes = _count(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES")))
    return has_several_nodes(env) or nodes > 1


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 1
