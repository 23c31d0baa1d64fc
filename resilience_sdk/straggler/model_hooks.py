"""Hooks on a user's model.

They never raise, and are left behind by copies; waits for other ranks inside its passes, as of FSDP2 or DDP's buffers.

FSDP2 gathers and reduces in hooks that it registers on its modules, on their outputs and (as an autograd node) on
their inputs. Public hooks before and after each of these bracket the waits, and the brackets are subtracted from
`fwd` and `bwd`. The deadlines see a rank inside a bracket in `comm_wait`: waiting for others, not stuck itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

import attrs

from resilience_sdk import faults
from resilience_sdk.recorder.blocks import Block
from resilience_sdk.straggler.gpu import GpuClock, GpuEvent, Hole


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


_POST_BACKWARD = "RegisterPostBackwardFunction"


@attrs.frozen
class Waited:
    """What was waited: on the clock of the host, and as stretches on that of the device."""

    ns: int = 0
    holes: tuple[Hole, ...] = ()

    def __add__(self, other: Waited) -> Waited:
        return Waited(self.ns + other.ns, self.holes + other.holes)


NOTHING = Waited()


class Waits:
    """Adds up the brackets of one attached model."""

    def __init__(self) -> None:
        self.block: Block | None = None
        self.clock: GpuClock | None = None
        self.is_used = False
        """Whether there was a bracket yet; until then there is nothing to take or forget."""
        self._since = 0
        self._has_opened = False
        self._mark: GpuEvent | None = None
        self._ns = 0
        self._holes: list[Hole] = []

    def begin(self, *_: object) -> None:
        """Open a bracket; one that is open still has lost its end, and does not count."""
        self.is_used = True
        if self._since:
            self._abandon()
        if self.clock is not None:
            self._mark = self.clock.mark()
        self._since = now = monotonic_ns()
        self._has_opened = self.block is not None and self.block.begin(now)

    def end(self, *_: object) -> None:
        """Close it."""
        if not self._since:
            return
        now = monotonic_ns()
        self._ns += now - self._since
        self._since = 0
        self._show_end(now)
        if self.clock is not None and self._mark is not None:
            self._holes.append(self.clock.hole(self._mark))
            self._mark = None

    def take(self) -> Waited:
        """Return what was waited since the last call."""
        if self._since:
            self._abandon()
        waited = Waited(self._ns, tuple(self._holes)) if self._ns or self._holes else NOTHING
        self._ns = 0
        self._holes.clear()
        return waited

    def _show_end(self, now: int) -> None:
        if self._has_opened and self.block is not None:
            self.block.drop(now)

    def _abandon(self) -> None:
        self._since = 0
        self._show_end(monotonic_ns())
        if self.clock is not None:
            self.clock.give_back(self._mark)
        self._mark = None


def sharded_modules(model: Any) -> list[Any]:
    """Return the modules of `model` that `fully_shard` manages."""
    kind = loaded("FSDPModule", "torch.distributed.fsdp", "torch.distributed._composable.fsdp")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def waits_for_buffers(model: Any) -> bool:
    """Tell whether a process waits before each forward until DDP has a model's buffers, such as a batch norm's, there.

    On the processor: a device waits by itself, and DDP copies the inputs to it in the same place, which is work.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel) or model.device_type != "cpu":
        return False
    # Without a reduction of its own DDP calls its module's `forward`, which has no hooks.
    calls_module = not getattr(model, "_delay_all_reduce_all_params", False)
    return model.broadcast_buffers and calls_module and next(model.module.buffers(), None) is not None


def loaded(name: str, *modules: str) -> Any:
    """Return a class of torch from the first of `modules` that is loaded and has it, else None: nobody uses it then.

    The second is where torch had it before it was public.
    """
    found = (getattr(sys.modules.get(module), name, None) for module in modules)
    return next(filter(None, found), None)


class Brackets:
    """The hooks of one sharded module: before and after those that FSDP2 has on it."""

    def __init__(self, waits: Waits, guard: Guard) -> None:
        self._waits = waits
        self._guard = guard
        self._begin = guard(waits.begin)
        self._end = guard(waits.end)

    def install(self, module: Any) -> list[Any]:
        """Register them and return their handles."""
        # FSDP2's own hooks break the graph here, so that compiled blocks end where they do.
        guard = self._guard.eager
        return [
            module.register_forward_pre_hook(guard(self.before_gather), prepend=True),
            module.register_forward_pre_hook(guard(self.after_gather), with_kwargs=True),
            module.register_forward_hook(guard(self.before_release), prepend=True),
            module.register_forward_hook(guard(self.after_release)),
        ]

    def before_gather(self, _module: Any, _args: Any) -> None:
        """Before the parameters are gathered for the forward."""
        self._waits.begin()

    def after_gather(self, _module: Any, args: Any, kwargs: Any) -> None:
        """After that. The inputs lead back to the node that reduces the gradients."""
        self._waits.end()
        for tensor in tensors_of((args, kwargs)):
            node = tensor.grad_fn
            if node is not None and node.name().startswith(_POST_BACKWARD):
                node.register_prehook(self._begin)
                node.register_hook(self._end)
                return  # all inputs have the same one

    def before_release(self, _module: Any, _args: Any, output: Any) -> None:
        """Before FSDP2 watches the outputs: in the backward it gathers when their gradients come."""
        self._hook(output, self._begin)
        self._waits.begin()

    def after_release(self, _module: Any, _args: Any, output: Any) -> None:
        """After that."""
        self._waits.end()
        self._hook(output, self._end)

    @staticmethod
    def _hook(output: Any, hook: Any) -> None:
        for tensor in tensors_of(output):
            hook_gradient(tensor, hook)


def hook_gradient(tensor: Any, hook: Any) -> None:
    """Have `hook` called with the gradient of what a forward has made.

    A parameter or an input among the outputs is none of it: it stays, and would collect a hook of every forward.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(hook)


def tensors_of(tree: Any, depth: int = 8) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples, mappings and records, such as a model takes and returns."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth > 0:
        if isinstance(tree, dict):
            parts: Any = tree.values()
        elif isinstance(tree, (list, tuple)):
            parts = tree
        elif hasattr(type(tree), "__dataclass_fields__") or hasattr(type(tree), "__attrs_attrs__"):
            parts = vars(tree).values() if hasattr(tree, "__dict__") else ()
        else:
            return
        for part in parts:
            yield from tensors_of(part, depth - 1)
