"""What is asked of torch's autograd: which backward runs, and to be called at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from resilience_sdk.straggler.hooks import Guard

NO_TASK = -1
"""Outside of all backwards."""


class Engine:
    """The usual way: a callback of the engine itself. What is asked in every step is torch's own function."""

    def __init__(self) -> None:
        import torch

        self.tensor: type = torch.Tensor
        self.gradients_wanted: Callable[[], bool] = torch.is_grad_enabled
        self.is_exporting: Callable[[], bool] = torch.compiler.is_compiling
        # Private in name, but what DDP and FSDP2 end their own backward with; a test watches over the order.
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        queue: Callable[[Callable[[], None]], None] | None = getattr(engine, "queue_callback", None)
        self.has_callbacks = queue is not None
        """Whether a backward can be told to call at its end."""
        self.at_end: Callable[[Callable[[], None]], None] = queue or _never
        """Call what is given at the end of the running backward, after what was queued before."""
        self.task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", None) or _no_task
        """Return the number of the backward that the calling thread runs, `NO_TASK` outside of one."""

    @property
    def handles(self) -> list[Any]:
        """Hooks that it has put on the model."""
        return []


def _never(_callback: Callable[[], None]) -> None:
    pass


def _no_task() -> int:
    return NO_TASK


class LastGradient(Engine):
    """Where the engine takes no callback: the parameter whose gradient comes last marks the end.

    Which one that is, the first backward shows; it is the same in every later one as long as the graph is. So there
    is one hook in the end, and the wait for the other ranks, which comes after it, is not timed.
    """

    def __init__(self, parameters: Iterable[Any], guard: Guard) -> None:
        super().__init__()
        self.at_end = self._at_end
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

    def _at_end(self, callback: Callable[[], None]) -> None:
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
