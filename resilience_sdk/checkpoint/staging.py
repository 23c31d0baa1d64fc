"""Copies of a captured state in the memory of the host, which a thread can write while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Staging:
    """Keeps its buffers from one save to the next: pages that are new cost several times the copy itself.

    So it holds as much memory as the state from the first save on, and a copy is valid until the next one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, value: Any) -> Any:
        """Return a copy of a captured state that shares nothing with it; tensors are on the CPU."""
        used: dict[str, torch.Tensor] = {}
        copied = self._copy(value, "", used, {})
        self._buffers = used
        return copied

    def _copy(self, value: Any, place: str, used: dict[str, torch.Tensor], seen: dict[Any, Any]) -> Any:
        if isinstance(value, torch.Tensor):
            key = _identity(value)
            if key not in seen:  # tied weights stay tied
                seen[key] = used[place] = self._copy_tensor(value.detach(), place)
            return seen[key]
        if isinstance(value, Mapping):
            made: Any = type(value)()
            for number, (key, item) in enumerate(value.items()):
                made[key] = self._copy(item, f"{place}/{number}", used, seen)
            if hasattr(value, "__dict__"):
                vars(made).update(vars(value))  # the `_metadata` of a module's state
            return made
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self._copy(item, f"{place}/{number}", used, seen) for number, item in enumerate(value))
        return bytearray(value) if isinstance(value, bytearray) else value

    def _copy_tensor(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return tensor.to("cpu", copy=True)
        return buffer.copy_(tensor)


def _identity(tensor: torch.Tensor) -> Any:
    """Return what two tensors share that are the same memory seen alike: `state_dict()` makes an object per name."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return id(tensor)
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
