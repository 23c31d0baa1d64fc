"""Which ways of spreading a model over ranks hide a slow rank from its own clock."""

from __future__ import annotations

from typing import Any

from resilience_sdk.straggler.waits import loaded, sharded_modules


def blind_spot(model: Any) -> str | None:
    """Return a sentence on what `attach` cannot tell apart for this model, or None."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return (
            "FSDP1 waits for the other ranks inside fwd and bwd, where it cannot be told from work; "
            "move to FSDP2 (fully_shard), or compare straggler.section() around parts without collectives"
        )
    if _is_tensor_parallel(model):
        return (
            "tensor parallelism waits for its group inside fwd and bwd, so the ranks of one group look alike: "
            "a slow group is found, the slow rank in it is not"
        )
    return None


def _is_tensor_parallel(model: Any) -> bool:
    """Tell whether parameters are split over more mesh dimensions than data parallelism does."""
    kind = loaded("DTensor", "torch.distributed.tensor", "torch.distributed._tensor")
    if kind is None:
        return False
    by_data = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    for parameter in model.parameters():
        if isinstance(parameter, kind):
            # fully_shard accounts for one split; HSDP's other dimension is a replica, no split.
            splits = sum(not placement.is_replicate() for placement in parameter.placements)
            if splits > (1 if id(parameter) in by_data else 0):
                return True
    return False
