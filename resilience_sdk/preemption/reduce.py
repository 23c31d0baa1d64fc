"""How all ranks stop at one check where no monitor coordinates: one small all_reduce, about once per second.

It is begun in one check and read in a later one, at which it is normally done, so nobody waits. What it carries is
merged by the maximum: whether anybody was asked to leave, and after how many checks the next one is due, so that all
ranks begin and read it at the same checks. All ranks read the same, and so stop at the same check.

A rank that comes too late for another one, or never calls `check()`, must not block it: the other waits, for a bounded
time and once. Who stops writes COMMIT into a write-once word of the store first, who has waited in vain VOID, and both
obey what stands. So a rank that was late does not go on where the others have stopped, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from resilience_sdk.preemption.asking import Hindrance
from resilience_sdk.preemption.protocol import Decision

EVERY_S = 1.0  # one all_reduce of about 0.1 ms in this time
_MOST_CHECKS = 100  # so that a loop that becomes slower is not deaf for long
_NEVER_MS = 1 << 53


class Group(Protocol):
    """All ranks of the job, beside the collectives of the training."""

    def begin(self, values: Sequence[int]) -> None:
        """Begin the next all_reduce (the maximum of each value)."""
        ...

    def result(self, patience_s: float) -> list[int] | None:
        """Return what the last one came to; None when it is not done within the time. Raises RuntimeError."""
        ...

    def decide(self, number: int, wanted: Decision) -> Decision:
        """Write the decision about all_reduce `number` unless there is one; return what stands. Raises RuntimeError."""
        ...

    def silent_ranks(self) -> list[int]:
        """Return (some of) the ranks that have never come here. Raises RuntimeError."""
        ...


@attrs.frozen
class Agreed:
    """What all ranks know after an all_reduce."""

    asked: bool
    every: int
    """Checks until the next one."""
    left_s: float | None
    """Seconds that were left when it was begun, on the rank that has the fewest; None: nobody knows."""
    is_even: bool
    """All ranks had called `check()` equally often."""


def contribution(asked: bool, every: int, left_s: float | None, count: int) -> list[int]:
    """Return what one rank brings."""
    left_ms = _NEVER_MS if left_s is None else min(_NEVER_MS, int(left_s * 1000))
    return [int(asked), every, -left_ms, count, -count]


def agreed(maxima: Sequence[int]) -> Agreed:
    """Return what the maxima of all contributions mean."""
    asked, every, left_ms, most, least = maxima
    return Agreed(bool(asked), every, None if -left_ms >= _NEVER_MS else -left_ms / 1000, most == -least)


def next_every(every: int, checks: int, seconds: float) -> int:
    """Return after how many checks the next one should come, when the last `checks` took `seconds`.

    Grows slowly, as the first checks of a loop may be quick, and falls at once.
    """
    wanted = min(_MOST_CHECKS, EVERY_S * checks / max(seconds, 1e-9))
    return max(1, min(int(wanted), 2 * every))


class Reduction:
    """One rank's part. The thread that calls `check()`."""

    def __init__(
        self,
        connect: Callable[[], Group | None],
        *,
        is_alone: bool,
        patience_s: float,
        clock: Callable[[], float],
        give_up: Callable[[str, Hindrance, Sequence[int]], None],
        first: Callable[[int], int] = int,
    ) -> None:
        """Prepare; `connect` returns None as long as there is no process group.

        `patience_s` bounds the wait for a late rank; `give_up` is told, once, why no stop can be agreed any more, and
        because of which ranks, where that is known.
        `first` is asked at the first check, with its number, from which one on all ranks take part.
        """
        self._connect = connect
        self._is_alone = is_alone
        self._patience_s = patience_s
        self._clock = clock
        self._give_up = give_up
        self._group: Group | None = None
        self._is_over = False
        self._first = first
        self._due: int | None = None
        self._every = 1
        self._number = 0
        self._begun_at: tuple[int, float] = 0, 0.0  # check, seconds of the clock
        self.ends_at: float | None = None
        """After a stop: when the time is over, by the clock, as far as any rank knows."""

    def stops(self, count: int, asked: bool, left_s: Callable[[], float | None]) -> bool:
        """Take part in check `count`; tell whether all ranks stop at it. `asked`: this rank was."""
        try:
            if self._due is None:
                self._due = self._first(count)
            if count < self._due or self._is_over:
                return False
            if self._group is not None:
                return self._read(count, asked, left_s)
            self._group = self._connect()
            if self._group is None:  # before init_process_group(), or one rank that needs none
                return asked and self._is_alone
            self._begin(count, asked, left_s)
        except Exception as error:  # noqa: BLE001 - torch without gloo, a strange word in the store: never the user's
            self._end(f"the ranks cannot talk to one another: {_first_line(error)}", Hindrance.CUT_OFF)
        return False

    def _begin(self, count: int, asked: bool, left_s: Callable[[], float | None]) -> None:
        assert self._group is not None
        now = self._clock()
        checks, seconds = count - self._begun_at[0], now - self._begun_at[1]
        wanted = next_every(self._every, checks, seconds) if self._number else 1
        self._group.begin(contribution(asked, wanted, left_s() if asked else None, count))
        self._number += 1
        self._begun_at = count, now
        self._due = count + self._every

    def _read(self, count: int, asked: bool, left_s: Callable[[], float | None]) -> bool:
        assert self._group is not None
        why, maxima = "", None
        try:
            maxima = self._group.result(self._patience_s)
        except Exception as error:  # noqa: BLE001 - see above
            why = f"the connection to another rank is lost: {_first_line(error)}"
        if maxima is None:
            if self._group.decide(self._number, Decision.VOID) is Decision.COMMIT:
                return True
            if why:
                self._end(why, Hindrance.CUT_OFF)
            else:
                self._end_for_the_missing(self._group)
            return False
        told = agreed(maxima)
        if not told.is_even:
            uneven = "the ranks do not call preemption.check() equally often; call it on every rank, once per step"
            self._end(uneven, Hindrance.UNEVEN)
            return False
        if told.asked:
            self.ends_at = None if told.left_s is None else told.left_s + self._begun_at[1]
            if self._may_stop():
                return True
            self._end("another rank has waited for this one in vain", Hindrance.LATE)
            return False
        self._every = told.every
        self._begin(count, asked, left_s)
        return False

    def _may_stop(self) -> bool:
        assert self._group is not None
        try:
            return self._group.decide(self._number, Decision.COMMIT) is Decision.COMMIT
        except Exception:  # noqa: BLE001 - see above
            return True  # the store is gone; all ranks have read the same, unless one has waited in vain

    def _end_for_the_missing(self, group: Group) -> None:
        cure = "call it on every rank, once per step"
        silent = group.silent_ranks()
        if silent:
            ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:8]))}"
            self._end(f"{ranks} never called preemption.check(); {cure}", Hindrance.NO_CHECK, silent)
        else:
            behind = f"a rank was more than {self._patience_s:g} s behind with its call of preemption.check()"
            self._end(f"{behind}; {cure}", Hindrance.LATE)

    def _end(self, why: str, hindrance: Hindrance, ranks: Sequence[int] = ()) -> None:
        self._is_over = True
        self._give_up(why, hindrance, ranks)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
