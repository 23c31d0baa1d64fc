"""The records of a training in a rehearsal: what a framework's loop logs, by name and step, whoever writes it down.

A real run is never looked at like this: a value on a device is waited for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from resilience_sdk.system.imports import when_imported

Leave = Callable[[str, int, float], object]
"""Takes the name, the step and the value of one record."""
_CONNECTOR = "pytorch.trainer.connectors.logger_connector.logger_connector"
_LIGHTNING = (f"lightning.{_CONNECTOR}", "pytorch_lightning.trainer.connectors.logger_connector.logger_connector")


def listen(leave: Leave) -> None:
    """Hear of each record from now on, or from the import of its framework on; where a name is missing, of none."""
    _wrap("transformers.trainer", "Trainer", "log", lambda trainer, *_: trainer.state.global_step, leave)
    for module in _LIGHTNING:
        _wrap(module, "_LoggerConnector", "log_metrics", _step_of_lightning, leave)
    _wrap("accelerate.accelerator", "Accelerator", "log", lambda _, step=None, *__: step, leave)


def _step_of_lightning(connector: Any, step: int | None = None, *_: Any) -> int:
    return int(connector.trainer.global_step) if step is None else step


def _wrap(module: str, owner: str, method: str, step_of: Callable[..., int | None], leave: Leave) -> None:
    def put_on(found: ModuleType) -> None:
        kind = getattr(found, owner, None)
        plain = getattr(kind, method, None)
        if not callable(plain):
            return

        @functools.wraps(plain)
        def heard(one: Any, values: Any, *args: Any, **options: Any) -> Any:
            with contextlib.suppress(Exception):  # of somebody's own kind: it is not compared
                step = step_of(one, *args, **{name: value for name, value in options.items() if name == "step"})
                _leave_all(values, -1 if step is None else int(step), leave)
            return plain(one, values, *args, **options)

        setattr(kind, method, heard)

    when_imported(module, put_on)


def _leave_all(values: Mapping[str, Any], step: int, leave: Leave) -> None:
    for name, value in values.items():
        if getattr(value, "numel", lambda: 1)() == 1 and not isinstance(value, (str, bytes, bool)):
            with contextlib.suppress(TypeError, ValueError):
                leave(str(name), step, float(value))
