"""How much work the batches of a trainer have: what its model is given, padding and all, since that is computed too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resilience_sdk import straggler

_INPUT = "input_ids"  # as the Trainer assumes of models that do not say


class Telling:
    """`get_batch_samples` of a trainer, which tells how large the batches are that it returns: one for each forward."""

    def __init__(self, method: Callable[..., Any], model: Any) -> None:
        self._method = method
        self._name = getattr(model, "main_input_name", _INPUT)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it, and tell. A size is known without the device, wherever the tensor is."""
        found = self._method(*args, **options)
        for batch in found[0]:
            size = _size(batch, self._name)
            if size is not None:
                straggler.work(size)
        return found


def _size(batch: Any, name: str) -> int | None:
    """Return how many elements the main input has; None for batches of another kind."""
    tensor = batch.get(name) if isinstance(batch, Mapping) else None
    count = getattr(tensor, "numel", None)
    size = count() if callable(count) else None
    return size if type(size) is int else None
