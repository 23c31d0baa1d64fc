"""Time that a rank waits for others inside its forward and backward, as FSDP2 does around each of its modules.

FSDP2 gathers and reduces in hooks that it registers on its modules, on their outputs and (as an autograd node) on
their inputs. Public hooks before and after each of these bracket the waits, and the brackets are subtracted from
`fwd` and `bwd`. The deadlines see a rank inside a bracket in `comm_wait`: waiting for others, not stuck itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

import attrs

from resilience_sdk.lanes import Block
from resilience_sdk.straggler.gpu_events import Event, GpuClock, Hole
from resilience_sdk.straggler.hooks import Guard

_POST_BACKWARD = "RegisterPostBackwardFunction"
_MOST_FORWARDS = 64


@attrs.frozen
class Waited:
    """What was waited: on the clock of the host, and as stretches on that of the device."""

    ns: int = 0
    holes: tuple[Hole, ...] = ()

    def __add__(self, other: Waited) -> Waited:
        return Waited(self.ns + other.ns, self.holes + other.holes)


NOTHING = Waited()


class ForwardWaits:
    """What was waited in each of the last forwards, until a backward comes back to its outputs. Many never do."""

    def __init__(self) -> None:
        """Keep nothing."""
        self._of: dict[int, Waited] = {}

    def add(self, forward: int, waited: Waited) -> None:
        """Keep what was waited in a forward; of many, forget the oldest."""
        if waited is NOTHING:
            return
        self._of[forward] = waited
        if len(self._of) > _MOST_FORWARDS:
            del self._of[next(iter(self._of))]

    def take(self, forward: int) -> Waited:
        """Return what was waited in a forward, once."""
        return self._of.pop(forward, NOTHING)


class Waits:
    """Adds up the brackets of one attached model."""

    def __init__(self) -> None:
        self.block: Block | None = None
        self.clock: GpuClock | None = None
        self.is_used = False
        """Whether there was a bracket yet; until then there is nothing to take or forget."""
        self._since = 0
        self._has_opened = False
        self._mark: Event | None = None
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

    def forget(self) -> None:
        """Drop what was waited since the last `take`: it belongs to no pass that is timed."""
        self.take()

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
