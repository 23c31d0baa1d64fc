"""Which trainer a callback is in, and whether it has what the adapter needs."""

from __future__ import annotations

import sys
from typing import Any

from resilience_sdk.errors import ConfigError

# What is called or wrapped on a trainer. It exists from Transformers 4.46 on.
SEAMS = ("train", "get_batch_samples", "evaluate", "_save_checkpoint", "_get_output_dir")


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
