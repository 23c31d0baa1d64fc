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
    from resilience_sdk.session.run import Run, current_run
    from resilience_sdk.session.run_start import start_run
    from resilience_sdk.session.train_step import resilient
    from resilience_sdk.settings import Settings

# name -> (module, attribute); an empty attribute means the module itself
_PUBLIC = {
    "CheckpointError": ("errors", "CheckpointError"),
    "ConfigError": ("errors", "ConfigError"),
    "MissingExtraError": ("errors", "MissingExtraError"),
    "NumericsError": ("errors", "NumericsError"),
    "Preempted": ("errors", "Preempted"),
    "ResilienceError": ("errors", "ResilienceError"),
    "Run": ("session.run", "Run"),
    "RunDirectoryError": ("errors", "RunDirectoryError"),
    "Settings": ("settings", "Settings"),
    "adapters": ("adapters", ""),
    "attribution": ("attribution", ""),
    "checkpoint": ("checkpoint", ""),
    "current_run": ("session.run", "current_run"),
    "faults": ("faults", ""),
    "health": ("health", ""),
    "heartbeat": ("heartbeats", "heartbeat"),
    "numerics": ("numerics", ""),
    "preemption": ("preemption", ""),
    "resilient": ("session.train_step", "resilient"),
    "start_run": ("session.run_start", "start_run"),
    "straggler": ("straggler", ""),
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
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name]
    module = importlib.import_module(f"{__name__}.{module_name}")
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _start_recording() -> Any:
    """Start this process's side at the first use of a block: the one thread from the primitives up to the session."""
    try:
        from resilience_sdk.session import start_recording
    except ImportError as error:  # a platform without POSIX
        from resilience_sdk import console, lanes

        lanes.disable()
        console.say_once("disabled", f"switched off ({error}): nothing is watched, recorded or restarted")
        return None
    return start_recording()


def _own_checkpoints() -> Any:
    """Return what tells a `Checkpointer` of its job, if there is any: from the checkpoints up to the session."""
    try:
        from resilience_sdk.session import own_checkpoints
    except ImportError:  # a platform without POSIX
        return None
    return own_checkpoints
