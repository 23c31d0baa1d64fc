"""What adapters share: steps and sections that hooks begin and end, a session, what a missing framework is told."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from resilience_sdk import lanes, preemption
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.lanes import BEATS, Beat, Block
from resilience_sdk.session import Session


class StepBeat:
    """The heartbeat `step` of one optimizer step, where hooks take the place of a `with` block.

    For the thread that trains. It keeps away where the script beats by itself: inside `Run.steps`, `@resilient` and
    `with heartbeat()` its `begin` does nothing. Never raises for a reason of its own.
    """

    __slots__ = ("_spent_ns", "beat")

    def __init__(self) -> None:
        """Be closed."""
        self.beat: Beat | None = None
        """What was begun."""
        self._spent_ns = 0

    def begin(self, step: int | None = None) -> None:
        """Open it unless it is open; `step` is the number of the global step, None where beats are only counted."""
        if self.beat is not None:
            if self.beat.t0:
                return
            self.beat = None  # closed behind our back: an exception left a block of the script around it
        try:  # `find_own_beat`, written out: in every step a call that can be spared is
            beat: Any = BEATS["step"]
            is_own = beat.lane.ident == get_ident()
        except (KeyError, AttributeError):
            is_own = False
        if not is_own:
            beat = lanes.find_own_beat("step")
        if beat is not None and beat.begin(monotonic_ns(), step):
            self.beat = beat

    def end(self) -> None:
        """Close it and count it: the step is complete."""
        beat, self.beat = self.beat, None
        spent_ns, self._spent_ns = self._spent_ns, 0
        if beat is not None:
            beat.end(monotonic_ns(), -spent_ns)

    def drop(self) -> None:
        """Close it without counting: the step did not come to its end."""
        self._spent_ns = 0
        self._close()

    def interrupt(self) -> None:
        """Close it for now: what comes next is no part of the step, which goes on with the next `begin`.

        Micro-batches at the end of an epoch may make no step: the evaluation behind them would look like one that
        does not end. What was spent so far counts when the step is complete, so that its deadline is not learned from
        the rest alone.
        """
        if self.beat is not None and self.beat.lane.ident == get_ident():  # a prefetcher may end a pass elsewhere
            self._spent_ns += self._close()

    def _close(self) -> int:
        """Close it, and return for how long it was open, in nanoseconds."""
        beat, self.beat = self.beat, None
        if beat is None or not beat.t0:
            return 0
        now = monotonic_ns()
        spent_ns = now - beat.t0
        beat.drop(now)
        return spent_ns


class HookedSection:
    """A section that one hook begins and another one ends; for the thread that trains."""

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind
        self._block: Block | None = None

    def begin(self) -> None:
        """Open it, unless it is open."""
        block = lanes.find_own_block(self._name, self._kind)
        if block is not None and block.begin(monotonic_ns()):
            self._block = block

    def end(self) -> None:
        """Close it, and count it."""
        block, self._block = self._block, None
        if block is not None:
            block.end(monotonic_ns())

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        block, self._block = self._block, None
        if block is not None:
            block.drop(monotonic_ns())


def checkpointer(session: Session, writer: Callable[[Path], object]) -> Checkpointer:
    """Return what saves for a framework that writes by itself, with the options of the session.

    Raises `ConfigError` and `RunDirectoryError` as `Checkpointer`.
    """
    settings = session.settings
    made = Checkpointer(
        {},
        run_dir=session.run_dir,
        every=settings.checkpoint_every,
        keep=settings.checkpoint_keep,
        group_readable=settings.group_readable,
        journal=session.journal,
        writer=writer,
    )
    made.time_left = preemption.time_left
    return made


def check_first_step(first_step: Any) -> None:
    """Raise ConfigError unless `attach(first_step=...)` is a number of steps, or None."""
    is_number = isinstance(first_step, int) and not isinstance(first_step, bool) and first_step >= 0
    if first_step is not None and not is_number:
        raise ConfigError(
            f"attach(first_step={first_step!r}): expected how many steps are complete, 0 or more, or None"
        )


def framework(module: str, package: str) -> ModuleType:
    """Import the framework of an adapter; raises MissingExtraError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there; something that it needs is not
        raise MissingExtraError(f"this adapter needs {package}: pip install {package}") from None
