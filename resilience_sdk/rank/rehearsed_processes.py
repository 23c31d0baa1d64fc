"""The processes that a rehearsed script makes, as each sees it: it is one of a group, a copy, or starts others.

A copy of a script of one process, and a rank that is about to start ranks of its own, waits before it does any harm:
the rehearsal ends it, and runs the script once.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.system.imports import when_imported

_WAITS_S = 30.0
_LOOK_S = 0.05
_OTHER_GROUPS = ("horovod", "mpi4py", "jax", "torch_xla")
"""Who may join the processes of a job without a process group of torch."""
_SPAWN = "torch.multiprocessing.spawn"
_HELPERS = ("torch.utils.data", "multiprocessing.", "concurrent.", "resilience_sdk.")


class ProcessWatch:
    """Says once what this process is among those that the launcher has started, and which it starts by itself."""

    def __init__(self, leave: Callable[..., object], world_size: int, flag: Path) -> None:
        """`leave` takes facts for the trace; `flag`: the file by which the rehearsal hears that it has seen enough."""
        self._leave = leave
        self._world_size = world_size
        self._flag = flag
        self._is_known = False

    def install(self) -> None:
        """Hear from now on of the first step of an optimizer, and of the processes that the script starts."""
        when_imported("torch.optim.optimizer", self._hook)
        plain = multiprocessing.process.BaseProcess.start

        @functools.wraps(plain)
        def start(child: Any) -> None:
            self._started(child)
            plain(child)

        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign,assignment]

    def _hook(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(lambda *_: self._stepping())

    def _stepping(self) -> None:
        """Note before a step whether this process has joined others by now."""
        if self._is_known:
            return
        self._is_known = True
        size = group_size()
        if size is not None:
            self._leave(group=size)
        elif not any(name in sys.modules for name in _OTHER_GROUPS):
            self._leave(alone=True)
            self._wait()

    def ended(self) -> None:
        """Note at the end whether it has joined others, where it came to no step."""
        if not self._is_known and (size := group_size()) is not None:
            self._is_known = True
            self._leave(group=size)

    def _started(self, child: Any) -> None:
        target = getattr(child, "_target", None)
        module = getattr(target, "__module__", None) or ""
        if target is None or module.startswith(_HELPERS) or group_size() is not None:
            return
        is_rank = module == _SPAWN or _names_rank(getattr(child, "_args", ()))
        self._leave(started=_SPAWN if module == _SPAWN else getattr(target, "__qualname__", module), is_rank=is_rank)
        if is_rank:
            self._wait()

    def _wait(self) -> None:
        if self._world_size > 1:
            self._flag.touch()
            until_s = time.monotonic() + _WAITS_S
            while time.monotonic() < until_s:
                time.sleep(_LOOK_S)


def group_size() -> int | None:
    """Return how many processes the process group has that this one has joined, without an import of torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None
    return int(distributed.get_world_size())


def _names_rank(arguments: Sequence[object]) -> bool:
    """Tell whether a child is given its rank and the number of ranks, as tutorials start them."""
    if len(arguments) < 2:
        return False
    rank, size = arguments[:2]
    return type(rank) is int and type(size) is int and 0 <= rank < size
