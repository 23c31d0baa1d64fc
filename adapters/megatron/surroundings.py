"""What the program has imported of Megatron, and what that says of this rank. Imports nothing by itself."""

from __future__ import annotations

import sys
from typing import Any

from resilience_sdk import environ
from resilience_sdk.console import say_once
from resilience_sdk.straggler.roles import set_role


def module(name: str) -> Any:
    """Return `megatron.<name>` if the program has imported it, else None."""
    return sys.modules.get(f"megatron.{name}")


def say_first(key: str, text: str) -> None:
    """Say it once, on one rank of all: it is the same on each."""
    identity = environ.rank_identity(environ.environment())
    if identity is None or identity.rank == 0:
        say_once(key, text)


def declare() -> None:
    """Give this rank the role of its pipeline stage: only ranks of one stage are compared."""
    state = module("core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return
    if state.get_pipeline_model_parallel_world_size() > 1:
        set_role(f"stage-{state.get_pipeline_model_parallel_rank()}")
    if state.get_tensor_model_parallel_world_size() > 1:
        say_first(
            "megatron tensor parallel",
            "megatron: tensor parallelism waits for its group inside fwd and bwd, so the ranks of one group look "
            "alike: a slow group is found, the slow rank in it is not",
        )
