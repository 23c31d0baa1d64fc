"""What in the arguments of a `Trainer` does not go together with the callback, in one line each."""

from __future__ import annotations

import signal
from typing import Any

from resilience_sdk.adapters.transformers.trainers import callbacks_of
from resilience_sdk.console import say_once


def warn(trainer: Any) -> None:
    """Say what the user should know, once, on rank 0. Nothing here changes anything."""
    args = trainer.args
    if args.process_index != 0:
        return
    if getattr(args, "enable_jit_checkpoint", False):
        say_once(
            "jit checkpoint",
            "TrainingArguments(enable_jit_checkpoint=True): its handler of SIGTERM has no say, since it would save "
            "on the rank that got the signal while the others wait for it; this callback saves on all: leave it out",
        )
    if args.save_only_model:
        say_once(
            "only model",
            "TrainingArguments(save_only_model=True): a resume begins with a fresh optimizer and schedule; leave it "
            "out where a job is to go on as if it had never stopped",
        )
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


def _is_sharded(model: Any) -> bool:
    names = {type(part).__name__ for part in (model, *model.parameters())}
    return bool(names & {"DTensor", "FullyShardedDataParallel"})


def handlers_before(trainer: Any) -> dict[int, Any]:
    """Return the handlers that were there before the trainer's own just-in-time checkpoint, by signal number."""
    found: dict[int, Any] = {}
    for callback in callbacks_of(trainer):
        manager = getattr(callback, "jit_manager", None)
        if manager is not None:
            found[signal.SIGTERM] = getattr(manager, "_original_sigterm_handler", None) or signal.SIG_DFL
    return found
