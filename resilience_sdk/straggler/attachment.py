"""`attach()`: the sections of a model and its optimizer with no code in the loop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.gpu import GpuClock, gpu_clock
from resilience_sdk.straggler.kernels import SUFFIX, KernelSampler, sampled_device, sampling_interval
from resilience_sdk.straggler.model_hooks import Brackets, Guard, Waits, loaded, sharded_modules, waits_for_buffers
from resilience_sdk.straggler.passes import Callback, CompiledCall, Engine, ModelPasses, PassListener


def blind_spot(model: Any) -> str | None:
    """Return a sentence on what `attach` cannot tell apart for this model, or None."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return (
            "FSDP1 waits for the other ranks inside fwd and bwd, where it cannot be told from work; "
            "move to FSDP2 (fully_shard), or compare straggler.section() around parts without collectives"
        )
    if _is_tensor_parallel(model):
        return (
            "tensor parallelism waits for its group inside fwd and bwd, so the ranks of one group look alike: "
            "a slow group is found, the slow rank in it is not"
        )
    return None


def _is_tensor_parallel(model: Any) -> bool:
    """Tell whether parameters are split over more mesh dimensions than data parallelism does."""
    kind = loaded("DTensor", "torch.distributed.tensor", "torch.distributed._tensor")
    if kind is None:
        return False
    by_data = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    for parameter in model.parameters():
        if isinstance(parameter, kind):
            # fully_shard accounts for one split; HSDP's other dimension is a replica, no split.
            splits = sum(not placement.is_replicate() for placement in parameter.placements)
            if splits > (1 if id(parameter) in by_data else 0):
                return True
    return False


_ATTACHED: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()
_STEPS_WITHOUT_FORWARD = 3
_NEVER_CALLED = (
    "attach: the attached model was never called, so fwd and bwd are not timed; attach the object that the loop calls, "
    "which torch.compile(model) or DDP(model) returned"
)


def attach(
    model: Any,
    optimizer: Any = None,
    *,
    prefix: str = "",
    kernels_every: float | None = None,
    on_forward: Callback | None = None,
    on_inference: Callback | None = None,
    on_inference_end: Callback | None = None,
    on_step: Callback | None = None,
    on_step_end: Callback | None = None,
    on_failure: Callback | None = None,
) -> Attachment:
    """Time `fwd`, `bwd`, `comm_wait` and `optim` of a model by hooks; detach with the returned handle.

    `bwd` is the backward up to the end of this rank's own work, `comm_wait` what it waits for the others after
    that, so that a slow rank has the longest `bwd` and the shortest `comm_wait`. Works for a plain module, under
    DDP, with gradient accumulation, `torch.compile`, activation checkpointing and FSDP2. Call it last, on the
    object that the loop calls: after DDP, `fully_shard` or `torch.compile`. Forwards without gradients are not
    timed. Costs less than 0.1 ms per step whatever the number of parameters (FSDP2: as much per sharded module
    again); no collective, no synchronisation with the device. A hook that fails says so once and switches all off.

    Args:
        model: The `nn.Module` that the loop calls. Attaching it again replaces the earlier hooks.
        optimizer: The `torch.optim.Optimizer`; None means every optimizer that steps in this process.
        prefix: Put before the names of the sections, for a second model in one loop.
        kernels_every: On CUDA, profile one step every so many seconds for the times of its kernels; None: as the
            setting `kernels_every` says, which is never unless it is given. The end of such a step waits for the device
            once; windows that would cost more than 1 % of the time come less often.
        on_forward: Called before each forward with gradients, on the thread that trains; for adapters.
        on_inference: The same before each forward without gradients.
        on_inference_end: The same behind it.
        on_step: The same before each step of the optimizer.
        on_step_end: The same behind it.
        on_failure: The same when a hook has failed, the model is gone, or the hooks are taken off: none of these is
            called any more.

    Raises:
        ConfigError: `model` is no module, `optimizer` no optimizer, or `kernels_every` no number above zero.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"attach({model!r}): expected the torch.nn.Module that the loop calls")
    if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError(
            f"attach(model, {type(optimizer).__name__}): expected a torch.optim.Optimizer; "
            "of a wrapper pass the one inside, or leave it out to time every optimizer"
        )
    if not isinstance(prefix, str):
        raise ConfigError(f"attach(model, prefix={prefix!r}): expected a string")
    is_number = isinstance(kernels_every, (int, float)) and not isinstance(kernels_every, bool)
    if kernels_every is not None and not (is_number and kernels_every > 0):
        raise ConfigError(f"attach(model, kernels_every={kernels_every!r}): expected seconds above zero, or None")
    earlier = _ATTACHED.get(model)
    if earlier is not None:
        earlier.detach()
    blind = blind_spot(model)
    if blind is not None and _is_first_rank():
        say_once("attach", f"attach: {blind}")
    lookup.recorder()  # what comes now, up to the first step, is a start-up that may get stuck
    _ATTACHED[model] = attachment = Attachment(
        model,
        optimizer,
        prefix,
        kernels_every,
        PassListener(on_forward, on_inference, on_inference_end, on_step, on_step_end, on_failure),
    )
    return attachment


def _is_first_rank() -> bool:
    """Tell whether this process says what concerns all ranks: one line per job, not one per rank."""
    identity = environ.rank_identity(environ.environment())
    return identity is None or identity.rank == 0


def kernel_sampler(device: str | None, asked_s: float | None = None) -> KernelSampler | None:
    """Return what samples the kernels of this process on a device of the profiler; None where none are sampled.

    `asked_s`: the seconds between two windows; None: as the setting says.
    """
    recorder, every_s = lookup.recorder(), sampling_interval(asked_s)
    if device is None or every_s is None or recorder is None:
        return None
    return KernelSampler(every_s, recorder.page.path.with_suffix(SUFFIX), device, says_cost=_is_first_rank())


class ModelDevice:
    """Where an attached model runs. Holds no reference to it."""

    def __init__(self, model: weakref.ref[Any], kernels_every: float | None) -> None:
        """Have its kernels profiled every so many seconds, if that is not None."""
        self._model = model
        self._kernels_every = kernels_every
        self._has_brackets = bool(sharded_modules(model()))
        self.sampler: KernelSampler | None = None

    def find_clock(self) -> GpuClock | None:
        """Return a clock for it, and begin to sample its kernels; None where it is no CUDA device."""
        model = self._model()
        if model is not None and not self._has_brackets and sharded_modules(model):
            say_once(
                "attach sharded",
                "attach: the model was sharded by fully_shard() after it was attached, so what it waits for other "
                "ranks counts as work of its own; attach it afterwards",
            )
        if model is None:
            return None
        self.sampler = kernel_sampler(sampled_device(model), self._kernels_every)
        return gpu_clock(model)


class Attachment:
    """The hooks of one model; `detach()` takes them off. Holds no reference to the model."""

    def __init__(
        self, model: Any, optimizer: Any, prefix: str, kernels_every: float | None, listener: PassListener
    ) -> None:
        """Put the hooks on; use `attach`."""
        self._model = weakref.ref(model)
        self._guard = Guard(self._failed)
        self._device = ModelDevice(self._model, kernels_every)
        self._passes = ModelPasses(prefix, self._device, Engine(), self._guard, listener)
        self._listener = listener
        self.if_never_called = _NEVER_CALLED
        """What is said where steps are made and the model is not called; a framework's user has attached nothing."""
        self._steps = 0
        self._has_wrapped = False
        self._handles: list[Any] = []
        try:
            for handle in chain(self._hook_model(model), self._hook_optimizer(optimizer)):
                self._handles.append(handle)
            self._wrap_compiled(model)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take the hooks off, also in the middle of a step: what is open is closed, not counted. May be repeated."""
        was_on, self._guard.is_on = self._guard.is_on, False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self._model()
        if model is not None:
            call = getattr(model, "_compiled_call_impl", None)
            if isinstance(call, CompiledCall) and call.guard is self._guard:
                model._compiled_call_impl = call.compiled
            if _ATTACHED.get(model) is self:
                del _ATTACHED[model]
        if was_on:
            self._passes.close()
        if self._device.sampler is not None:
            self._device.sampler.stop()
        if was_on:
            self._tell_end()  # another attach() of the model may have put its own hooks in the place of these

    @property
    def waits(self) -> Waits:
        """What adds up the waits for other ranks inside of its passes, for a framework whose hooks are not torch's."""
        return self._passes.waits

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` as a forward of its own: for a framework that calls a method of the model, not the model."""
        return CompiledCall(call, self._guard, self._passes)

    def _hook_model(self, model: Any) -> Iterator[Any]:
        guard, passes = self._guard, self._passes
        brackets = Brackets(passes.waits, guard)
        for module in sharded_modules(model):
            yield from brackets.install(module)
        if waits_for_buffers(model):
            # Between these DDP has its buffers from rank 0: whoever waits for a rank that is late is not slow itself.
            yield model.register_forward_pre_hook(guard(passes.waits.begin))
            yield model.module.register_forward_pre_hook(guard(passes.waits.end), prepend=True)
        # Around the brackets: prepended after them, and appended after them.
        yield model.register_forward_pre_hook(guard(passes.forward_begins), prepend=True)
        yield model.register_forward_hook(guard(passes.forward_gives), prepend=True)
        yield model.register_forward_hook(guard(passes.forward_ends), always_call=True)

    def _hook_optimizer(self, optimizer: Any) -> Iterator[Any]:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        of_one = optimizer is not None
        yield (optimizer.register_step_pre_hook if of_one else register_optimizer_step_pre_hook)(
            self._guard(self._step_begins)
        )
        yield (optimizer.register_step_post_hook if of_one else register_optimizer_step_post_hook)(
            self._guard(self._step_ends)
        )

    def _step_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._listener.on_step is not None:
            self._listener.on_step()
        model = self._model()
        if model is None:
            self._guard.is_on = False  # hooks on every optimizer outlive the model
            self._tell_end()
            return
        if not self._passes.forwards:
            self._look_for_forwards(model)
        has_closure = False
        if len(args) > 1 or kwargs:
            has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        self._passes.step_begins(optimizer, has_closure=has_closure)

    def _step_ends(self, optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        try:
            self._passes.step_ends(optimizer)
        finally:
            if self._listener.on_step_end is not None:
                self._listener.on_step_end()
        if self._device.sampler is not None:
            self._device.sampler.step_ends()

    def _look_for_forwards(self, model: Any) -> None:
        """Find out why steps are made, but no forward was seen: the model is compiled, and its hooks are gone."""
        self._steps += 1
        if not self._has_wrapped:
            self._wrap_compiled(model)
        if self._steps == _STEPS_WITHOUT_FORWARD:
            say_once("attach forward", self.if_never_called)

    def _wrap_compiled(self, model: Any) -> None:
        """Put the hooks of `model.compile()` around what it compiled, which is the model with the hooks it has."""
        if getattr(model, "_compiled_call_impl", None) is not None:
            model._compiled_call_impl = self.around(model._compiled_call_impl)
            self._has_wrapped = True

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(Exception):  # what stays open would look like a hang
            self._passes.close()
        say_once(
            "attach failed",
            f"attach: a hook failed, all are switched off and training goes on: {type(error).__name__}: {error}",
        )
        self._tell_end()

    def _tell_end(self) -> None:
        if self._listener.on_failure is not None:
            self._listener.on_failure()
