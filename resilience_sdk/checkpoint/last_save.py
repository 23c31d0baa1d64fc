"""The last save of a training: tried again while time may cure what hinders it, since nobody can save it afterwards.

All ranks wait together and outside of a collective: each sleeps by itself, and they meet for one short exchange after
it, so no timeout of a process group can end the wait. The deadlines of the ranks are paused meanwhile. The wait ends
after a limit, or when a stop that somebody has asked for leaves no more time; who is asked hears of it by the check
that is made at each meeting, as between two steps.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk.checkpoint.failure import Unsaved
from resilience_sdk.checkpoint.ranks import Ranks
from resilience_sdk.core.console import say
from resilience_sdk.core.words import clock_time
from resilience_sdk.incidents import count_words
from resilience_sdk.recorder import lookup
from resilience_sdk.system import linux
from resilience_sdk.system.storage_probe import ProbeAnswer, WriteProbe

_FIRST_PAUSE_S = 0.25  # between two meetings; the next is twice as long
_MAX_PAUSE_S = 2.0
_MAX_TRY_PAUSE_S = 30.0  # between two tries of a whole save, where the storage takes small writes
_ASKED_PAUSE_S = 0.1  # once somebody asks to stop: a stop is agreed by a few meetings
# Of the time that a stop leaves, for the words and the end of the processes.
_LEAVING_SHARE, _MIN_LEAVING_S, _MAX_LEAVING_S = 0.3, 2.0, 10.0
_EARLIER_S = 0.5  # by which an end that is told anew is another one
_SPARE = 4
DEFAULT_LIMIT_S = 300.0  # as that of the setting `wait_limit`


class Terms(Protocol):
    """What a wait asks of the job that this process is in. Any rank."""

    def wait_limit_s(self) -> float:
        """Return how long a wait may last."""
        ...

    def time_left(self) -> float | None:
        """Return the seconds until the job is ended; None while no end is known."""
        ...

    def is_asked(self) -> bool:
        """Return whether this rank knows that the job was asked to leave; a known end of its time is not that."""
        ...

    def hears_stops(self) -> bool:
        """Return whether this rank takes part in agreeing on a stop."""
        ...

    def asks_stop(self, step: int) -> bool:
        """Return whether all ranks are to stop here, after so many steps. Collective, as `preemption.check`."""
        ...


@attrs.frozen
class NoTerms:
    """No job: nobody asks to stop."""

    def wait_limit_s(self) -> float:
        """Return the default."""
        return DEFAULT_LIMIT_S

    def time_left(self) -> float | None:
        """Return None."""
        return None

    def is_asked(self) -> bool:
        """Return False."""
        return False

    def hears_stops(self) -> bool:
        """Return False."""
        return False

    def asks_stop(self, step: int) -> bool:
        """Return False."""
        return False


@attrs.frozen
class End:
    """How the last save ended, on all ranks alike. `unsaved` is None where it was made."""

    unsaved: Unsaved | None
    waited_s: float = 0.0
    is_stopped: bool = False
    """All ranks were asked to stop while they waited."""
    is_cut: bool = False
    """The wait was ended by the time that a stop, or the scheduler's end of the job, leaves."""

    @property
    def leaves(self) -> bool:
        """Whether the job is to leave now, to be requeued."""
        return self.is_stopped or self.is_cut


def save_patiently(
    save: Callable[[], Unsaved | None],
    failed_here: Callable[[], bool],
    place: Path,
    ranks: Ranks,
    terms: Terms,
    *,
    expected_s: float,
    is_stop: bool,
    report: Callable[[Unsaved, bool, float], None],
) -> End:
    """Save, and again and again where time may cure it; return how it ended. Collective.

    `save` is collective, and returns the same on all ranks; `failed_here` tells whether this rank failed in it.
    `expected_s`: how long a save takes; `is_stop`: the ranks have agreed on a stop before.
    `report(unsaved, saved, waited_s)` records a wait that begins (0 s) or has ended, on rank 0.
    """
    unsaved = save()
    if unsaved is None or not unsaved.passes:
        return End(unsaved)
    wait = _Wait(place, ranks, terms, unsaved.step, expected_s=expected_s, is_stop=is_stop)
    if ranks.rank == 0 and wait.left_s() > 0:
        say(_words(unsaved, place, wait))
        report(unsaved, False, 0.0)
    wait.failed = unsaved
    while unsaved is not None and unsaved.passes and not wait.is_over:
        with _paused(f"waiting for {place} to take writes: {unsaved.why}"):
            wait.until_it_may_work(asks_here=failed_here() or ranks.rank == 0)
        if not wait.is_over:
            unsaved = save()
            wait.tried()
    if ranks.rank == 0:
        report(unsaved or wait.failed, unsaved is None, wait.waited_s)
        if unsaved is None:
            say(f"saved after all, {wait.waited_s:.0f} s later: {place} takes writes again")
    return End(unsaved, wait.waited_s, wait.is_stopped, wait.is_cut)


def _words(unsaved: Unsaved, place: Path, wait: _Wait) -> str:
    left_s, now = wait.left_s(), time.time()
    until = clock_time(now + left_s, now)
    why = "wait_limit"
    if wait.is_cut_first:
        why = "the time that the stop leaves" if wait.is_asked else "the time that the scheduler leaves"
    return (
        f"NOT SAVED YET, the state after {count_words(unsaved.step)}: {unsaved.told}; all ranks wait for {place} to "
        f"take writes and try again, until {until} ({why}: {left_s:.0f} s)"
    )


class _Wait:
    """One wait of all ranks, which stays the same on each of them."""

    def __init__(self, place: Path, ranks: Ranks, terms: Terms, step: int, *, expected_s: float, is_stop: bool) -> None:
        self._place = place
        self._ranks = ranks
        self._terms = terms
        self._step = step
        self._expected_s = expected_s
        self._may_ask = not is_stop
        self._began_s = self._tried_s = time.monotonic()
        self._try_pause_s = _FIRST_PAUSE_S
        self._probe: WriteProbe | None = None
        self._stop_ends_s = math.inf
        self._leaving_s = 0.0
        self.failed = Unsaved(step, "")
        self.is_stopped = self.is_over = self.is_cut = False

    @property
    def waited_s(self) -> float:
        """Seconds since the first try failed."""
        return time.monotonic() - self._began_s

    @property
    def is_asked(self) -> bool:
        """Whether the job was asked to leave, as this rank knows it."""
        return self._terms.is_asked()

    @property
    def is_cut_first(self) -> bool:
        """Whether the time of the job is over before that of the wait, as this rank knows it."""
        return self._stop_left_s() <= self._limit_left_s()

    def left_s(self) -> float:
        """Return for how many seconds this rank may wait; 0 or less: no longer."""
        return min(self._limit_left_s(), self._stop_left_s())

    def _limit_left_s(self) -> float:
        return self._terms.wait_limit_s() - self.waited_s

    def _stop_left_s(self) -> float:
        stop_s = self._terms.time_left()
        if stop_s is None:
            return math.inf
        ends_s = time.monotonic() + stop_s
        if ends_s < self._stop_ends_s - _EARLIER_S:  # asked now, where the end of the job's time was known before
            self._stop_ends_s = ends_s
            self._leaving_s = min(_MAX_LEAVING_S, max(_MIN_LEAVING_S, _LEAVING_SHARE * stop_s))
        return stop_s - self._expected_s - self._leaving_s

    def tried(self) -> None:
        """Note that a save was tried: the next comes later."""
        self._tried_s = time.monotonic()
        self._try_pause_s = min(_MAX_TRY_PAUSE_S, self._try_pause_s * 2)

    def until_it_may_work(self, *, asks_here: bool) -> None:
        """Wait until the storage takes writes on all ranks that failed, or the wait is over. Collective."""
        pause_s = _FIRST_PAUSE_S
        while True:
            answer = self._ask(pause_s) if asks_here else self._sleep(pause_s)
            may_try = time.monotonic() - self._tried_s >= self._try_pause_s
            mine = {"left_s": self.left_s(), "works": answer, "may_try": may_try, "asked": self.is_asked}
            mine["cut"] = self.is_cut_first
            mine["hears"] = self._may_ask and self._terms.hears_stops()
            told = self._ranks.gather(mine)
            if not self.is_stopped and all(one["hears"] for one in told):
                self.is_stopped = self._terms.asks_stop(self._step)
            shortest = min(told, key=lambda one: float(one["left_s"]))
            if shortest["left_s"] <= 0:
                self.is_over, self.is_cut = True, bool(shortest["cut"])
                return
            if told[0]["may_try"] and all(one["works"] for one in told):
                return
            pause_s = min(_MAX_PAUSE_S, pause_s * 2, shortest["left_s"] + 0.01)
            if not self.is_stopped and any(one["asked"] and one["hears"] for one in told):
                pause_s = _ASKED_PAUSE_S

    def _sleep(self, seconds: float) -> bool:
        time.sleep(seconds)
        return True

    def _ask(self, seconds: float) -> bool:
        """Wait so long, and tell whether the storage has taken a write meanwhile."""
        began_s = time.monotonic()
        answer: ProbeAnswer | None = None
        try:
            self._probe = self._probe or WriteProbe(self._place)
            answer = self._probe.wait(seconds)
        except RuntimeError:  # no thread: then the save itself is tried
            answer = ProbeAnswer()
        if answer is not None:
            self._probe = None
        time.sleep(max(0.0, seconds - (time.monotonic() - began_s)))
        # Where not even the directory could be made, only a save tells whether there is room now.
        return answer is not None and answer.number in (None, errno.ENOENT)


@contextlib.contextmanager
def _paused(reason: str) -> Iterator[None]:
    """Suspend the deadlines of this rank: who waits for a disk, and says so, does not hang."""
    recorder = lookup.recorder()
    if recorder is None:
        yield
        return
    recorder.pause(reason)
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        recorder.resume(time.monotonic_ns() - began_ns)


class SpareDescriptors:
    """A few descriptors that are kept for the end: without any, nobody could write down why a job has ended."""

    def __init__(self) -> None:
        """Keep none yet."""
        self._kept: list[tuple[int, tuple[int, int]]] = []

    def keep(self) -> None:
        """Keep them from now on, as far as they are to be had. Never raises."""
        if not self._kept:
            with contextlib.suppress(OSError):
                for _ in range(_SPARE):
                    descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                    self._kept.append((descriptor, linux.identity(descriptor)))

    def give_back(self) -> None:
        """Close them, for what is written next. One that the program has closed may be a file of its own by now."""
        while self._kept:
            descriptor, known = self._kept.pop()
            if linux.is_still(descriptor, known):
                os.close(descriptor)


spare_descriptors = SpareDescriptors()


def lost_words(unsaved: Unsaved, good_step: int | None, end: End) -> str:
    """Return what is lost for want of the last save, and why it could not be made. Pure."""
    what, count = _what_is_in_no_checkpoint(unsaved, good_step)
    lost = f"{what} ARE LOST" if count > 1 else f"{what} IS LOST"
    tried = f", tried for {end.waited_s:.0f} s" if end.waited_s >= 1 else ""
    return f"{lost}: the last state could not be saved ({unsaved.told}{tried})"


def left_out_words(unsaved: Unsaved, good_step: int | None) -> str:
    """Return what is in no checkpoint because the newest save was left out, and what saves it next time. Pure."""
    what, count = _what_is_in_no_checkpoint(unsaved, good_step)
    verb = "are" if count > 1 else "is"
    return (
        f"{what} {verb} in no checkpoint: the newest save was left out ({unsaved.why}); `save(step, last=True)` after "
        "the loop waits until the last state is saved"
    )


def _what_is_in_no_checkpoint(unsaved: Unsaved, good_step: int | None) -> tuple[str, int]:
    """Return the steps since the newest good checkpoint in words, and their number."""
    kept = good_step or 0
    count = unsaved.step - kept
    if count <= 0:
        return f"what followed step {unsaved.step - 1}", 0
    return (f"step {kept}", 1) if count == 1 else (f"steps {kept} to {unsaved.step - 1} ({count_words(count)})", count)


def resume_words(good_step: int | None, place: Path) -> str:
    """Return where the newest good state is, and what leads on from there. Pure."""
    if good_step is None:
        return f"no checkpoint is in {place}: a rerun of the same command starts over"
    good = f"the newest good checkpoint is after {count_words(good_step)} in {place}"
    return f"{good}; a rerun of the same command goes on from there"


def facts_of(unsaved: Unsaved, place: Path, saved: bool, waited_s: float) -> dict[str, Any]:
    """Return the fields of the journal's event of a wait. Pure."""
    why = None if saved else unsaved.told
    return {"what": f"{place} to take writes", "ok": saved, "why": why, "waited_s": round(waited_s, 3)}
