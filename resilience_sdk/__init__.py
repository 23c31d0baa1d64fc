"""Makes a PyTorch training loop survive and explain its faults.

    from resilience_sdk import heartbeat, straggler

    for step, batch in enumerate(loader):
        with heartbeat():
            with straggler.section("fwd"):
                loss = model(batch)

Importing this package loads nothing but itself: each public name is resolved at its first use, and the first
use in a loop starts what there is to start. This module is also where the floors are wired together.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from resilience_sdk._version import __version__

if TYPE_CHECKING:
    from resilience_sdk import adapters, attribution, checkpoint, faults, health, numerics, preemption, straggler
    from resilience_sdk.core.settings import Settings
    from resilience_sdk.errors import (
        CheckpointError,
        ConfigError,
        MissingExtraError,
        NumericsError,
        Preempted,
        ResilienceError,
        RunDirectoryError,
    )
    from resilience_sdk.heartbeats import heartbeat
    from resilience_sdk.rank.run import Run, current_run, resilient, start_run

# Where the public names are; those of `__all__` that stand nowhere here are modules.
_HOMES = {
    "core.settings": ("Settings",),
    "errors": (
        *("CheckpointError", "ConfigError", "MissingExtraError", "NumericsError", "Preempted", "ResilienceError"),
        "RunDirectoryError",
    ),
    "heartbeats": ("heartbeat",),
    "rank.run": ("Run", "current_run", "resilient", "start_run"),
}
__all__ = [
    "CheckpointError",
    "ConfigError",
    "MissingExtraError",
    "NumericsError",
    "Preempted",
    "ResilienceError",
    "Run",
    "RunDirectoryError",
    "Settings",
    "__version__",
    "adapters",
    "attribution",
    "checkpoint",
    "current_run",
    "faults",
    "health",
    "heartbeat",
    "numerics",
    "preemption",
    "resilient",
    "start_run",
    "straggler",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    module = importlib.import_module(f"{__name__}.{home or name}")
    value = module if home is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _start_recording() -> Any:
    """Start this process's side at the first use of a block: the one thread from the primitives up to the session."""
    try:
        from resilience_sdk.rank import start_recording
    except ImportError as error:  # a platform without POSIX
        from resilience_sdk.core import console
        from resilience_sdk.recorder import lookup

        lookup.disable()
        console.say_once("disabled", f"switched off ({error}): nothing is watched, recorded or restarted")
        return None
    return start_recording()


def _own_checkpoints() -> Any:
    """Return what tells a `Checkpointer` of its job, if there is any: from the checkpoints up to the session."""
    try:
        from resilience_sdk.rank import checkpoints
    except ImportError:  # a platform without POSIX
        return None
    return checkpoints
