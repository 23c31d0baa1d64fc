"""What adapters share: the heartbeat of a step that hooks begin and end, and how a missing framework is said."""

from __future__ import annotations

import importlib
from time import monotonic_ns
from types import ModuleType

from resilience_sdk import lanes
from resilience_sdk.errors import MissingExtraError
from resilience_sdk.lanes import Beat


class StepBeat:
    """The heartbeat `step` of one optimizer step, where hooks take the place of a `with` block.

    For the thread that trains. It keeps away where the script beats by itself: inside `Run.steps`, `@resilient` and
    `with heartbeat()` its `begin` does nothing. Never raises for a reason of its own.
    """

    __slots__ = ("_beat",)

    def __init__(self) -> None:
        """Be closed."""
        self._beat: Beat | None = None

    def begin(self, step: int | None = None) -> None:
        """Open it unless it is open; `step` is the number of the global step, None where beats are only counted."""
        if self._beat is not None:
            if self._beat.t0:
                return
            self._beat = None  # closed behind our back: an exception left a block of the script around it
        beat = lanes.find_own_beat("step")
        if beat is None or beat.t0:
            return
        (beat if step is None else beat.at_step(step)).__enter__()
        self._beat = beat

    def end(self) -> None:
        """Close it and count it: the step is complete."""
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.__exit__(None, None, None)

    def drop(self) -> None:
        """Close it without counting: the step did not come to its end."""
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.drop(monotonic_ns())


def framework(module: str, package: str) -> ModuleType:
    """Import the framework of an adapter; raises MissingExtraError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there; something that it needs is not
        raise MissingExtraError(f"this adapter needs {package}: pip install {package}") from None
