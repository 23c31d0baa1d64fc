"""What in the surroundings of a fit does not go together with ours. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resilience_sdk import environ
from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError

_FT_LAUNCHER = "FT_RANK_MONITOR_IPC_SOCKET"
_SEAMS = ("callbacks", "strategy", "profiler", "fit_loop", "global_step", "save_checkpoint", "fast_dev_run")


def check(trainer: Any) -> None:
    """Raise ConfigError where a trainer lacks what we build on: it is of another framework, or of another time."""
    missing = [name for name in _SEAMS if not hasattr(trainer, name)]
    if not missing and not hasattr(trainer.strategy, "restore_checkpoint_after_setup"):
        missing = ["strategy.restore_checkpoint_after_setup"]
    if missing:
        kind = type(trainer)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} has no {', '.join(missing)}: these callbacks are for the "
            "Trainer of lightning.pytorch or pytorch_lightning, 2.5 or newer; for a loop of your own use "
            "resilience_sdk.adapters.pytorch.attach"
        )


def warn(trainer: Any) -> None:
    """Say what the user should know, once, on rank 0."""
    if not trainer.is_global_zero:
        return
    if _FT_LAUNCHER in environ.environment():
        say_once(
            "ft_launcher",
            "STARTED BY ft_launcher: its monitors hear no heartbeat of this script, so it restarts nothing that hangs, "
            "and its workload control is not served; hangs are reported here, not restarted. Start with "
            "`resilience run` in its place: it takes torchrun's options, --fault-tol-cfg-path and --ft-param-*",
        )
    if trainer.world_size > 1:
        for name in deadlocking(trainer.callbacks):
            say_once(
                f"on exception:{name}",
                f"{name} saves when a rank raises, in a collective that the other ranks are not in: an exception on "
                "one of several ranks then hangs the job. Remove it: a killed or failed job resumes from the newest "
                "checkpoint of the run directory",
            )


def deadlocking(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of what would save in `on_exception`. Pure."""
    found = []
    for callback in callbacks:
        name = type(callback).__name__
        if any(base.__name__ == "OnExceptionCheckpoint" for base in type(callback).__mro__):
            found.append(name)
        elif getattr(callback, "save_on_exception", False):
            found.append(f"{name}(save_on_exception=True)")
    return found
