"""Stand-ins for calls of an engine, and a bracket for what its backend has begun."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class EngineSteps:
    """The steps of an engine in the shape of a `torch.optim.Optimizer`: hooks before and behind each real one.

    The optimizers inside step once per partition of the parameters, and not at all where a scaler finds an overflow.
    """

    def __init__(self, engine: Any) -> None:
        """Have no hooks."""
        self._engine, self._plain = engine, engine.step
        self._before: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._behind: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.is_behind_backward = False
        """Whether a backward was made since the engine's last `step`; set by whoever hears it."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(self, args, kwargs)` before each step; return the handle that removes it."""
        return _registered(self._before, hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        """The same behind it."""
        return _registered(self._behind, hook)

    def step(self, *args: Any, **options: Any) -> Any:
        """As `engine.step`, which makes none but behind the last micro-batch."""
        engine = self._engine
        before = engine.global_steps
        if _is_last_micro_batch(engine):
            for hook in tuple(self._before.values()):
                hook(self, (self,), {})
        result = self._plain(*args, **options)
        self.is_behind_backward = False
        if engine.global_steps != before:
            for hook in tuple(self._behind.values()):
                hook(self, (self,), {})
        return result


def _registered(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> Any:
    from torch.utils.hooks import RemovableHandle

    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _is_last_micro_batch(engine: Any) -> bool:
    is_managed = getattr(engine, "managed_gradient_accumulation", None)
    if is_managed is not None and not is_managed():
        return True  # the script calls step() for each step, and not for each micro-batch
    return bool(engine.is_gradient_accumulation_boundary())


COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced"),
    *("all_to_all", "all_to_all_single", "broadcast", "inference_all_reduce", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "barrier"),
)
"""Of DeepSpeed's backend: where a rank waits for others."""


class Pending:
    """A collective that was begun, whose `wait` is one for other ranks; it lends the handle's other attributes."""

    __slots__ = ("_begin", "_end", "_handle")

    def __init__(self, handle: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._handle, self._begin, self._end = handle, begin, end

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait for it."""
        self._begin()
        try:
            return self._handle.wait(*args, **options)
        finally:
            self._end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
