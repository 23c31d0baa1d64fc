"""`work()` and `set_role()`: what a rank says of its work: how much a step has, and which part of the job it does.

The amounts go the way of durations: two rows of the rank page, one with each call, one with the sum of each step. The
monitor takes the one that fits a section: `fwd` is passed as often as micro-batches are told, `optim` once per step.
The role is a file beside the page and not a word of it: few jobs have roles, and they are declared once.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.plain_file import plain
from resilience_sdk.core.settings.parse import plain_name
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.blocks import Beat
from resilience_sdk.recorder.lookup import TELLERS
from resilience_sdk.recorder.recorder import Recorder

CALLS, STEPS = "calls", "steps"
_WORK = "work"
_PULSE = "pulse"
_MOST = 1e300  # what a page has room for, with some to spare for a sum
_USUAL = "step"  # the heartbeat that counts the steps, where there are several


def work(amount: float) -> None:
    """Tell how much work the step has that runs, or begins next: tokens, pixels, in any unit that stays the same.

    Call it on every rank, on the thread that trains, once for each forward (of each micro-batch): within a step amounts
    add up. Everybody being slower is then told from everybody having more to do. Takes a number, or a tensor of one
    element on the CPU. Costs about a microsecond, never blocks. Needs a heartbeat, or an optimizer's steps, to
    know what a step is.

    Raises ConfigError for what is no number, or below zero, and for a tensor on a device: reading it would wait.
    """
    if type(amount) is not int and type(amount) is not float:
        amount = _number(amount)
    if not 0.0 <= amount <= _MOST:
        raise ConfigError(
            f"work({amount!r}): an amount of work is a finite number from 0 up, such as a count of tokens"
        )
    teller = TELLERS.get(_WORK)
    if teller is None:
        recorder = lookup.recorder()
        if recorder is None:
            return
        if recorder.teller is None:  # kept there too: it counts steps, which go on when names are looked up anew
            recorder.teller = Teller(recorder)
        teller = TELLERS[_WORK] = recorder.teller
    teller.tell(amount)


def _number(amount: Any) -> float:
    """Return what else may stand for a number; never waits for a device."""
    device = getattr(amount, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ConfigError(
            f"work(<tensor on {device}>): reading it would wait for the device; count on the CPU before the batch is "
            "moved, or take what the host knows, such as batch.numel()"
        )
    if not isinstance(amount, (bool, str, bytes)):
        try:
            return float(amount)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise ConfigError(f"work({_shown(amount)}): expected a number, such as a count of tokens")


def _shown(amount: Any) -> str:
    shape = getattr(amount, "shape", None)
    return repr(amount)[:80] if shape is None else f"<{type(amount).__name__} of shape {tuple(shape)}>"


class Teller:
    """Writes the amounts of this process into its page."""

    __slots__ = ("_base", "_beat", "_beats", "_calls", "_recorder", "_step", "_steps", "_sum")

    def __init__(self, recorder: Recorder) -> None:
        """Begin with the step that runs, or begins next."""
        self._recorder = recorder
        self._calls = recorder.amounts(CALLS)
        self._steps = recorder.amounts(STEPS)
        self._beat: Beat | None = None
        self._beats = 0  # heartbeats that were there when ours was chosen
        self._base = 0  # what our heartbeat had completed when step 0 of ours began
        self._step = 0
        self._sum = 0.0

    def tell(self, amount: float) -> None:
        """Add an amount to the step; what the one before had is complete then."""
        self._calls.add(amount)
        beats = self._recorder.owner.beats
        if len(beats) != self._beats:
            self._choose(beats)
        beat = self._beat
        if beat is not None and beat.n - self._base > self._step:
            self._end_step(beat.n - self._base)
        self._sum += amount

    def _end_step(self, now: int) -> None:
        """Publish a step that is complete, and nothing for those that were told none."""
        self._steps.add(self._sum)
        if now - self._step > 1:
            self._steps.skip(now - self._step - 1)
        self._step, self._sum = now, 0.0

    def _choose(self, beats: list[Beat]) -> None:
        """Choose the heartbeat that counts the steps, as the monitor does. Its steps go on where another's ended.

        Nobody knows whether a pulse stands before its step or behind it. So the steps are counted from the first one
        that is told, if a pulse came before that.
        """
        is_first = self._beat is None
        self._beats = len(beats)
        best = max(beats, key=lambda beat: (beat.name == _USUAL, beat.kind != _PULSE))
        if best is self._beat:
            return
        self._beat = best
        if not is_first:
            self._base = best.n - self._step - 1
        elif best.kind == _PULSE and self._calls.n == 1:
            self._base = best.n


ROLE_SUFFIX = ".role"
_MOST_ROLE_BYTES = 64


def set_role(name: str) -> None:
    """Say what this rank does, such as `"stage-1"` of a pipeline: only ranks of one role are compared.

    Call it before the first step; on any thread. Who calls it again begins with a new history. Without it the role is
    setting `straggler_role`. Raises ConfigError for a name with other characters than letters, digits and `_.-`, or
    more than 64.
    """
    try:
        role = plain_name(name)
    except ValueError as error:
        raise ConfigError(f"set_role({name!r}): {error}") from None
    if role is None:
        raise ConfigError(f"set_role({name!r}): expected a name, such as 'stage-1'")
    recorder = lookup.recorder()
    if recorder is not None:
        with contextlib.suppress(OSError):  # no room for it: then this rank is compared with all
            write_whole(recorder.page.path.with_suffix(ROLE_SUFFIX), role)


def role_file(stem: Path) -> Path:
    """Return where the rank whose files have this stem says its role."""
    return stem.with_name(stem.name + ROLE_SUFFIX)


def read_role(stem: Path) -> str | None:
    """Return the role of the rank whose files have this stem; None where it has not said any."""
    try:
        with open(role_file(stem), encoding="ascii", errors="replace", opener=plain) as file:
            return plain_name(file.read(_MOST_ROLE_BYTES))
    except (OSError, ValueError):
        return None
