"""Parts of a `Trainer` that the adapter needs: methods, callbacks, optimizer, arguments. Nothing here changes it."""

from __future__ import annotations

import signal
import sys
from typing import Any

from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note
from resilience_sdk.errors import ConfigError

# What is called or wrapped on a trainer. It exists from Transformers 4.46 on.
SEAMS = (
    "train",
    "training_step",
    "get_batch_samples",
    "evaluate",
    "prediction_step",
    "_save_checkpoint",
    "_get_output_dir",
)


def calling_trainer(callback: Any) -> Any:
    """Return the trainer that is calling a hook of `callback` right now; None where it cannot be told.

    Hooks are given everything but the trainer. It is the object whose method is on the stack, and which has the
    callback.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if any(one is callback for one in callbacks_of(found)):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the callbacks that an object has in the way of a `Trainer`."""
    handler = getattr(trainer, "__dict__", {}).get("callback_handler")
    found = getattr(handler, "callbacks", None)
    return found if isinstance(found, list) else []


def check(trainer: Any) -> None:
    """Raise `ConfigError` unless `trainer` is a `Trainer`, of a version that has all seams."""
    kind = type(trainer)
    if "callback_handler" not in getattr(trainer, "__dict__", {}) or not hasattr(trainer, "args"):
        raise ConfigError(
            f"ResilienceCallback.attach({trainer!r}): expected a transformers.Trainer, or an object of a subclass; for "
            "a loop of your own use resilience_sdk.adapters.pytorch, with Accelerate resilience_sdk.adapters.accelerate"
        )
    missing = [name for name in SEAMS if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"ResilienceCallback: {kind.__module__}.{kind.__qualname__} has no {missing[0]}(), which it needs: "
            "pip install 'transformers>=4.46', or use resilience_sdk.adapters.pytorch.attach(model, optimizer)"
        )


def torch_optimizer(trainer: Any) -> Any:
    """Return the optimizer that really steps, inside of what Accelerate has put around it; None = not known."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if hasattr(optimizer, "register_step_pre_hook") else None


def warn(trainer: Any) -> None:
    """Say what the user should know, once, on rank 0. Nothing here changes anything."""
    args = trainer.args
    is_first = args.process_index == 0
    if is_first and getattr(args, "enable_jit_checkpoint", False):
        say_once(
            "jit checkpoint",
            "TrainingArguments(enable_jit_checkpoint=True): its handler of SIGTERM has no say, since it would save "
            "on the rank that got the signal while the others wait for it; this callback saves on all: leave it out",
        )
    _note_limits(args)
    if not is_first:
        return
    if args.fsdp and not (trainer.is_fsdp_enabled and _is_sharded(trainer.model_wrapped)):
        say_once(
            "fsdp",
            f"TrainingArguments(fsdp={args.fsdp!r}): FSDP is asked for, but the model is not sharded, as on a CPU: "
            "each rank holds and saves all of it; leave it out, or start on accelerators",
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        say_once(
            "deepspeed",
            "DeepSpeed steps its optimizer inside of the backward: section `optim` is empty, and `bwd` has it; "
            "heartbeat, stop and checkpoints are as ever",
        )


def _note_limits(args: Any) -> None:
    """Say which arguments keep a resume from being exact. On all ranks."""
    if args.save_only_model:
        note(
            "only model",
            "optimizer, schedule and generators",
            "TrainingArguments(save_only_model=True) saves none of them",
            "leave it out",
        )
    if args.ignore_data_skip:
        note(
            "data skip",
            "which samples come next",
            "TrainingArguments(ignore_data_skip=True) begins the epoch anew",
            "leave it out",
        )
    if not getattr(args, "dataloader_in_order", True):
        note(
            "loader's order",
            "the order in which workers deliver batches",
            "TrainingArguments(dataloader_in_order=False) takes whichever is ready first",
            "leave it out",
        )


def _is_sharded(model: Any) -> bool:
    names = {type(part).__name__ for part in (model, *model.parameters())}
    return bool(names & {"DTensor", "FullyShardedDataParallel"})


def handlers_before(trainer: Any) -> dict[int, Any]:
    """Return the handlers that were there before the trainer's own just-in-time checkpoint, by signal number."""
    managers = [getattr(callback, "jit_manager", None) for callback in callbacks_of(trainer)]
    found = [getattr(one, "_original_sigterm_handler", None) or signal.SIG_DFL for one in managers if one is not None]
    return {signal.SIGTERM: found[-1]} if found else {}
