"""State that is saved as one for all ranks, and yet differs by rank: buffers, and small objects with a state.

Ranks have digests of it compared in a save; one that has other content than rank 0 saves its own beside it. Parameters
and what belongs to an optimizer are the same on all ranks by what training is, and are not looked at.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from resilience_sdk.checkpoint.state import StateMap, apply, capture, fitting, unwrap

MAX_DIGESTED_BYTES = 1 << 20
"""Of a tensor; of a larger one elements at equal distances are looked at, so that a save costs no second one."""

KEY = "resilience.by_rank"
"""The entry of a rank's own file. A name of the program's own may not be the same by chance."""


def digests(state: StateMap) -> dict[str, dict[str, int]]:
    """Return the digests of this rank, by entry and by what is in it. Never raises."""
    return {name: {part: _digest(value) for part, value in parts.items()} for name, parts in _parts(state)}


def differing(state: StateMap, own: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a copy of what this rank has otherwise than rank 0, by these digests."""
    found: dict[str, dict[str, Any]] = {}
    for name, parts in _parts(state):
        others = first.get(name, {})
        kept = {part: _copy(value) for part, value in parts.items() if own.get(name, {}).get(part) != others.get(part)}
        if kept:
            found[name] = kept
    return found


def restore(state: StateMap, saved: Mapping[str, Any]) -> None:
    """Put back what `differing` has returned; raises `CheckpointError` where it does not fit."""
    for name, parts in saved.items():
        item = state.shared.get(name)
        if item is None:
            continue
        if not isinstance(item, nn.Module):
            apply(name, item, parts[""])
            continue
        buffers = dict(unwrap(item).named_buffers(remove_duplicate=False))
        for part, value in parts.items():
            with fitting(f"{name}.{part}"), torch.no_grad():
                buffers[part].copy_(value)


def _parts(state: StateMap) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries that may differ, with their buffers, or with the whole under the name ""."""
    spread = state.sharded_names
    for name, item in state.shared.items():
        if isinstance(item, nn.Module):
            yield name, dict(_saved_buffers(unwrap(item)))
        elif name in spread or isinstance(item, torch.optim.Optimizer):
            continue
        elif (whole := _small(name, item)) is not None:
            yield name, {"": whole}


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            is_saved = name not in part._non_persistent_buffers_set
            if is_saved and type(buffer) in (torch.Tensor, getattr(nn, "Buffer", torch.Tensor)):
                yield f"{path}.{name}" if path else name, buffer


def _small(name: str, item: Any) -> Any:
    """Return the state of another object; None where it cannot be taken here.

    Rank 0 alone had to be able to give it until now.
    """
    try:
        return capture(name, item)
    except Exception:  # noqa: BLE001 - whatever a state_dict() raises; rank 0 says so of its own
        return None


def _digest(value: Any, before: int = 0) -> int:
    if isinstance(value, torch.Tensor):
        return _digest_tensor(value, before)
    if isinstance(value, Mapping):
        for key, item in value.items():
            before = _digest(item, zlib.crc32(repr(key).encode(), before))
        return before
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            before = _digest(item, zlib.crc32(b",", before))
        return before
    return zlib.crc32(repr(value).encode(), before)


def _digest_tensor(tensor: torch.Tensor, before: int) -> int:
    try:
        flat = tensor.detach().reshape(-1)
        flat = flat[:: -(-flat.numel() * flat.element_size() // MAX_DIGESTED_BYTES) or 1]
        flat = flat.to("cpu").contiguous().view(torch.uint8)
        return zlib.crc32(flat.numpy(), before) if flat.numel() else before
    except (RuntimeError, TypeError, ValueError):  # no strided tensor
        return zlib.crc32(repr(tensor.shape).encode(), before)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copy(item) for item in value)
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return value
