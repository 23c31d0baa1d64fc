"""What is asked of torch's autograd: which backward runs, and to be called at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from resilience_sdk.straggler.hooks import Guard


class Engine:
    """The usual way: a callback of the engine itself."""

    def __init__(self) -> None:
        import torch

        self.gradients_wanted: Callable[[], bool] = torch.is_grad_enabled
        # Private in name, but what DDP and FSDP2 end their own backward with; a test watches over the order.
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        self._queue = getattr(engine, "queue_callback", None)
        self._task = getattr(torch._C, "_current_graph_task_id", None)

    @property
    def has_callbacks(self) -> bool:
        """Whether a backward can be told to call at its end."""
        return self._queue is not None

    @property
    def handles(self) -> list[Any]:
        """Hooks that it has put on the model."""
        return []

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call at the end of the running backward, after what was queued before."""
        if self._queue is not None:
            self._queue(callback)

    def task(self) -> int | None:
        """Return the number of the backward that the calling thread runs, or None outside of one."""
        task = -1 if self._task is None else int(self._task())
        return None if task < 0 else task


class LastGradient(Engine):
    """Where the engine takes no callback: the parameter whose gradient comes last marks the end.

    Which one that is, the first backward shows; it is the same in every later one as long as the graph is. So there
    is one hook in the end, and the wait for the other ranks, which comes after it, is not timed.
    """

    def __init__(self, parameters: Iterable[Any], guard: Guard) -> None:
        super().__init__()
        self._last: Any = None
        self._callback: Callable[[], None] | None = None
        self._handles = {
            parameter: parameter.register_post_accumulate_grad_hook(guard(self._gradient_is_there))
            for parameter in parameters
            if parameter.requires_grad
        }

    @property
    def handles(self) -> list[Any]:
        """The hooks on parameters, to be removed in the end."""
        return list(self._handles.values())

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call when the last gradient is there, from the second backward on."""
        if self._last is None:
            return
        if len(self._handles) > 1:
            for parameter, handle in self._handles.items():
                if parameter is not self._last:
                    handle.remove()
            self._handles = {self._last: self._handles[self._last]}
        self._callback = callback

    def _gradient_is_there(self, parameter: Any) -> None:
        if self._callback is None:
            self._last = parameter
            return
        callback, self._callback = self._callback, None
        callback()
        self._callback = None  # what it has asked for in turn is a later end, and nobody tells when that is
