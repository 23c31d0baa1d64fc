"""How much work the batches of a trainer have: what its model is given, padding and all, since that is computed too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resilience_sdk import straggler
from resilience_sdk.console import say_once
from resilience_sdk.straggler.hooks import Guard

_INPUT = "input_ids"  # as the Trainer assumes of models that do not say


class Telling:
    """`get_batch_samples` of a trainer, which tells how large the batches are that it returns: one for each forward."""

    def __init__(self, method: Callable[..., Any], model: Any) -> None:
        self._method = method
        self._name = getattr(model, "main_input_name", _INPUT)
        self._guard = Guard(_failed)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it, and tell. A size is known without the device, wherever the tensor is."""
        found = self._method(*args, **options)
        if self._guard.is_on:
            try:
                self._tell(found[0])
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self._guard.fail(error)
        return found

    def _tell(self, batches: Any) -> None:
        if not isinstance(batches, (list, tuple)):
            return  # what can be iterated once is the trainer's
        for batch in batches:
            size = _size(batch, self._name)
            if size is not None:
                straggler.work(size)


def _failed(error: Exception) -> None:
    say_once(
        "batch sizes",
        f"ResilienceCallback: how large batches are is not told any more, and training goes on: "
        f"{type(error).__name__}: {error}",
    )


def _size(batch: Any, name: str) -> int | None:
    """Return how many elements the main input has; None for batches of another kind."""
    tensor = batch.get(name) if isinstance(batch, Mapping) else None
    count = getattr(tensor, "numel", None)
    size = count() if callable(count) else None
    return size if type(size) is int else None
