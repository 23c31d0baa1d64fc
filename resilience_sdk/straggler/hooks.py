"""The callables that are hung on a user's model: they never raise, and are left behind by copies of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from resilience_sdk import faults


class Guard:
    """Makes hooks that can be switched off together, and are after the first of them has failed."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """Call `failed(error)` once, when a hook has failed: training goes on without any of them."""
        import torch

        self.is_on = True
        self.is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling  # `is_compiling` asks another one
        self._failed = failed

    def __call__(self, run: Callable[..., None]) -> Hook:
        """Return `run` as a hook."""
        return Hook(self, run)

    def eager(self, run: Callable[..., None]) -> Hook:
        """Return `run` as a hook that compiled code calls too, at the price of a break in its graph there."""
        return _eager_hook()(self, run)

    def run(self, call: Callable[[], None]) -> None:
        """Call it as a hook would, for what is never compiled: at half the cost."""
        if self.is_on:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Switch all hooks off; raises what a planned fault was asked to. Where the error is caught."""
        if isinstance(error, faults.InjectedError):
            raise error
        if self.is_on:
            self.is_on = False
            self._failed(error)


class Hook:
    """One of ours. In compiled code it is not there: a clock has no place in a graph, and a break would cost more."""

    __slots__ = ("_guard", "_run")

    def __init__(self, guard: Guard, run: Callable[..., None]) -> None:
        self._guard = guard
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        """Run it where that may be."""
        guard = self._guard
        if guard.is_compiling() or not guard.is_on:
            return
        try:
            self._run(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
            guard.fail(error)

    def runs(self, function: Callable[..., None]) -> bool:
        """Tell whether it is `function` that it runs, perhaps with arguments bound."""
        run = self._run
        return (run.func if isinstance(run, functools.partial) else run) == function

    # A copied or pickled model takes its hooks along. Ours time one model in one process, and know neither a
    # copy nor another process: there they do nothing.

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __copy__(self) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return left_behind, ()


class CompiledCall:
    """What `model.compile()` made of a model's call, with hooks around it instead of in it.

    Nobody but the model holds it: it leads to what is compiled, and that to the model.
    """

    __slots__ = ("_begins", "_ends", "_gives", "compiled", "guard")

    def __init__(self, compiled: Callable[..., Any], guard: Guard, begins: Hook, gives: Hook, ends: Hook) -> None:
        self.compiled = compiled
        self.guard = guard
        self._begins = begins
        self._gives = gives
        self._ends = ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        self._begins()
        try:
            output = self.compiled(*args, **kwargs)
            self._gives(output)
        finally:
            self._ends()
        return output


@functools.cache
def _eager_hook() -> type[Hook]:
    import torch

    class EagerHook(Hook):
        __slots__ = ()
        __call__ = torch.compiler.disable(Hook.__call__)

    return EagerHook


def no_hook(*_: Any) -> None:
    """Do nothing: what a hook is in a copy."""


def left_behind() -> Callable[..., None]:
    """Return `no_hook`; what unpickling a hook calls."""
    return no_hook
