"""A gloo group of all ranks beside those of the program, for the stop alone.

It is made by hand rather than by `new_group()`: that waits for all ranks, and counts groups, so that a rank which never
comes here would block the others, or break the groups that the program makes later. This one connects when it is first
used, waits nowhere, and has connections of its own to the store.
"""

from __future__ import annotations

import ctypes
import datetime
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from resilience_sdk import environ
from resilience_sdk.preemption.protocol import Decision

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
        # Its thread waits in the store for the address of a rank, and who else uses that connection waits with it.
        own = _store(dist, f"resilience/stop/{attempt}/gloo", _REDUCE_S)
        self._group = dist.ProcessGroupGloo(own, self._rank, self._size, _options(dist, self._size))
        # Its end would wait for an all_reduce that a rank has not come to, so it never ends: the process does.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
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

    def decide(self, number: int, wanted: Decision) -> Decision:
        """Write the decision about all_reduce `number` unless there is one; return what stands. Raises RuntimeError."""
        stands = _bounded(lambda: self._store.compare_set(f"decision/{number}", "", wanted.value))
        return Decision(stands.decode())

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
