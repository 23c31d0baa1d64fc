"""The agreement without a monitor: one small all_reduce about once per second makes all ranks stop at one check.

It is made by hand rather than by `new_group()`: that waits for all ranks, and counts groups, so that a rank which never
comes here would block the others, or break the groups that the program makes later. This one connects when it is first
used, waits nowhere, and has connections of its own to the store.

It is begun in one check and read in a later one, at which it is normally done, so nobody waits. What it carries is
merged by the maximum: whether anybody was asked to leave, and after how many checks the next one is due, so that all
ranks begin and read it at the same checks. All ranks read the same, and so stop at the same check.

A rank that comes too late for another one, or never calls `check()`, must not block it: the other waits, for a bounded
time and once. Who stops writes COMMIT into a write-once word of the store first, who has waited in vain VOID, and both
obey what stands. So a rank that was late does not go on where the others have stopped, nor the other way round.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event
from resilience_sdk.preemption.agreement import DecisionCell, StopDecision, StoreCell
from resilience_sdk.preemption.context import PreemptionContext, is_request
from resilience_sdk.preemption.reasons import Hindrance, asker, notice_name
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.system import gloo_teardown

T = TypeVar("T")

NAME = "resilience"  # in flight records
_STORE_S = 10.0
_REDUCE_S = 30 * 86400.0  # a rank may evaluate for long; who waits for it does so elsewhere, and bounded
_POLL_S = 0.0005
_MOST_ASKED = 64  # ranks about whom the store is asked one by one


def connect(attempt: int) -> GlooGroup | None:
    """Return the group, or None where torch.distributed is not initialised, or has one rank. Never imports torch.

    Raises RuntimeError and OSError.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return _bounded(lambda: GlooGroup(dist, attempt))


class GlooGroup:
    """See the module. All ranks begin the same all_reduces in the same order. One thread at a time."""

    def __init__(self, dist: Any, attempt: int) -> None:
        """Make the group; waits for nobody."""
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = _store(dist, f"resilience/stop/{attempt}", _STORE_S)
        self._cell = StoreCell(self._store)
        # Its thread waits in the store for the address of a rank, and who else uses that connection waits with it.
        own = _store(dist, f"resilience/stop/{attempt}/gloo", _REDUCE_S)
        self._group = dist.ProcessGroupGloo(own, self._rank, self._size, _options(dist, self._size))
        # Its end would wait for an all_reduce that a rank has not come to, so it never ends: the process does.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        atexit.register(gloo_teardown.settle_at_exit)
        self._maximum = dist.AllreduceOptions()
        self._maximum.reduceOp = dist.ReduceOp.MAX
        self._work: Any = None
        self._values: Any = None
        self._store.set(_came(self._rank), "")

    def begin(self, values: Sequence[int]) -> None:
        """Begin the next all_reduce (the maximum of each value); about 0.1 ms."""
        import torch

        self._values = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._work = self._group.allreduce([self._values], self._maximum)

    def result(self, patience_s: float) -> list[int] | None:
        """Return what it came to; None when it is not done within the time. Raises RuntimeError."""
        deadline = time.monotonic() + patience_s
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        self._work.wait()  # raises what went wrong
        return [int(value) for value in self._values.tolist()]

    def decide(self, round_: int, wanted: StopDecision) -> StopDecision:
        """See `DecisionCell`; rounds are all_reduces. Raises RuntimeError."""
        return _bounded(lambda: self._cell.decide(round_, wanted))

    def silent_ranks(self) -> list[int]:
        """Return the ranks, of those asked about, that have never come here. Raises RuntimeError."""
        asked = range(min(self._size, _MOST_ASKED))
        return _bounded(lambda: [rank for rank in asked if not self._store.check([_came(rank)])])


def _bounded(ask: Callable[[], T]) -> T:
    """Ask the store, in a thread that is left behind when no answer comes: on a dead link torch waits without bound.

    Raises RuntimeError.
    """
    answers: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:  # noqa: BLE001 - raised below
            answers.put((None, error))

    threading.Thread(target=run, name="resilience-store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=_STORE_S)
    except queue.Empty:
        raise RuntimeError(f"the store has not answered for {_STORE_S:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def _store(dist: Any, prefix: str, timeout_s: float) -> Any:
    """Return the job's store under a prefix, on a connection of its own. Raises RuntimeError."""
    base = dist.distributed_c10d._get_default_store()
    if base is None:
        raise RuntimeError("the process group has no store")
    if not hasattr(base, "clone"):
        raise RuntimeError("this release of torch has one connection to the store for all")
    store = base.clone()
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return dist.PrefixStore(prefix, store)


def _came(rank: int) -> str:
    return f"came/{rank}"


def _options(dist: Any, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=_REDUCE_S)
    options._threads = 1
    options._devices = _devices(dist)
    options.group_name = NAME
    options.global_ranks_in_group = list(range(size))
    return options


def _devices(dist: Any) -> list[Any]:
    gloo = dist.ProcessGroupGloo
    interfaces = environ.environment().get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in interfaces.split(",") if name]
    try:
        if names:
            return [gloo.create_device(interface=name, lazy_init=True) for name in names]
        return [gloo.create_default_device(lazy_init=True)]
    except TypeError:
        raise RuntimeError("this release of torch connects all ranks of a gloo group at once") from None


EVERY_S = 1.0  # one all_reduce of about 0.1 ms in this time
_MOST_CHECKS = 100  # so that a loop that becomes slower is not deaf for long
_NEVER_MS = 1 << 53


class Group(DecisionCell, Protocol):
    """All ranks of the job, beside the collectives of the training, and where they write what a stop came to."""

    def begin(self, values: Sequence[int]) -> None:
        """Begin the next all_reduce (the maximum of each value)."""
        ...

    def result(self, patience_s: float) -> list[int] | None:
        """Return what the last one came to; None when it is not done within the time. Raises RuntimeError."""
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
            if self._group.decide(self._number, StopDecision.VOID) is StopDecision.COMMIT:
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
            return self._group.decide(self._number, StopDecision.COMMIT) is StopDecision.COMMIT
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


_MOST_PATIENCE_S = 30.0  # for a rank that is late


class Unmonitored:
    """Notices from wherever they come, and the agreement by `preemption.reduce`."""

    __slots__ = ("_handlers", "_is_told", "_reduction", "_side", "deaf")

    def __init__(self, side: PreemptionContext, handlers: Handlers) -> None:
        self._side = side
        self.deaf = side.deaf
        self._handlers = handlers
        self._is_told = False
        self._reduction = Reduction(
            lambda: connect(side.attempt),
            is_alone=side.is_alone,
            # A stop that comes when the time is over helps nobody.
            patience_s=max(1.0, min(_MOST_PATIENCE_S, side.grace_s / 2)),
            clock=time.monotonic,
            give_up=self._give_up,
            first=side.first_check,
        )

    @property
    def ends_at(self) -> float | None:
        """When the time is over (monotonic seconds), as far as another rank knew at the stop."""
        return self._reduction.ends_at

    def look(self) -> None:
        """Look for a file that asks, and for a monitor that was asked; in the helper thread.

        A monitor hears the cloud, and may ask by itself; it has journalled that, and has told the ranks their time.
        """
        if self._side.words[at.W_DEADLINE_NS]:
            self._handlers.note(at.NOTICE_REQUEST)
        if is_request(self._side.request_file, self._side.began_unix):
            self._handlers.note(at.NOTICE_FILE)

    def stops(self, count: int, time_left: Callable[[], float | None]) -> bool:
        """Tell whether all ranks stop at check `count`; the thread that trains."""
        is_asked = self._handlers.noted_at is not None
        if is_asked and not self._is_told:
            self._is_told = True
            number = self._side.words[at.W_NOTICE]
            if number != at.NOTICE_REQUEST:  # which is in the journal with its reason
                kind = asker(number).value
                self._side.journal.emit(Event.PREEMPT_NOTICE, source=notice_name(number), kind=kind)
        if self.deaf:  # who began an all_reduce would wait for them
            if is_asked:
                self._give_up(
                    f"{_named(self.deaf)} cannot be recorded, and hears of no stop", Hindrance.UNSEEN, self.deaf
                )
            return False
        return self._reduction.stops(count, is_asked, time_left)

    def _give_up(self, why: str, hindrance: Hindrance, ranks: Sequence[int]) -> None:
        if say_once("reduce", f"no stop can be agreed from here on: {why}"):
            whom = [{"rank": rank} for rank in ranks]
            self._side.journal.emit(
                Event.DEGRADED, what="preemption", why=why, hindrance=hindrance.value, culprits=whom
            )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
