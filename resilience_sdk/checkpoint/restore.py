"""Reading a chosen checkpoint back into live objects, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint import payload
from resilience_sdk.checkpoint.rng import restore_rng
from resilience_sdk.checkpoint.state import StateMap, apply
from resilience_sdk.console import say


@attrs.frozen
class Restored:
    """What a checkpoint brought besides the state: for the caller to hand on.

    `position` is the data position (a JSON value), `rng` the random number generators of this rank, `pending`
    the states of data loaders that are not known yet. The last two are empty if the number of ranks changed.
    """

    values: dict[str, Any]
    position: Any
    rng: Mapping[str, Any] | None
    pending: dict[str, Any]


def restore(directory: Path, files: list[str], saved_ranks: int, rank: int, ranks: int, state: StateMap) -> Restored:
    """Load a checkpoint that was verified into `state` and the generators; return the rest.

    Raises `CheckpointError` when it does not fit, `InvalidCheckpointError` or `OSError` when a file cannot be
    read.
    """
    unused = state.apply_shared(payload.read_tensors(directory / payload.SHARED))
    if unused and rank == 0:
        say(f"the checkpoint also has {', '.join(unused)}, which state does not ask for: left out")
    values = payload.read_json(directory / payload.VALUES)
    if saved_ranks != ranks:
        if rank == 0:
            say(
                f"saved by {saved_ranks} ranks, resumed by {ranks}: random number generators and data "
                f"loaders with state start anew"
            )
        document = payload.read_json(directory / payload.rank_document(0))
        return Restored(values, document.get("position"), None, {})
    document = payload.read_json(directory / payload.rank_document(rank))
    pending: dict[str, Any] = {}
    if payload.rank_tensors(rank) in files:
        pending = dict(payload.read_tensors(directory / payload.rank_tensors(rank)))
    for name, item in state.per_rank.items():
        if name in pending:
            apply(name, item, pending.pop(name))
    restore_rng(document["rng"])
    return Restored(values, document.get("position"), document["rng"], pending)
