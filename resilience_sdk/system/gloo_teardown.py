"""Two ways in which torch's gloo threads spoil the end of a rank, kept from happening.

torch 2.13 hands each gloo collective of a backward pass the caller's `contextvars` context. The last owner of
the work, often gloo's own thread, needs the GIL to let go of it. If the last reference to the process group
goes meanwhile - DDP's reducer holds one, and goes when the training function returns - its destructor joins
that thread while it holds the GIL, and neither ever ends.

A process that was started by exec loses the race hardly ever. In a forked one, whose threads begin with page
faults, a fourth of all short DDP runs hung at their end (docs/design.md has the count).

And where a script never calls `destroy_process_group`, that same thread may ask for the GIL when the interpreter is
going down already. Python before 3.14 then ends the thread, which torch's C++ does not allow: the process aborts
("terminate called without an active exception", SIGABRT) after the training was complete.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import Any

_PAUSE_S = 0.002
_AT_MOST_S = 2.0
_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")


def let_threads_finish() -> None:
    """Make `destroy_process_group` wait, without the GIL, until gloo's threads are idle. Call before user code.

    That call is what leaves the reducer as the last owner, so whatever gloo's threads still hold they can
    let go of here. Does nothing where torch.distributed is not loaded.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or c10d is None or not hasattr(c10d, "destroy_process_group"):
        return
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        _wait_until_idle()
        return destroy(*args, **kwargs)

    c10d.destroy_process_group = distributed.destroy_process_group = destroy_process_group


def has_group() -> bool:
    """Tell whether a process group of torch is there; False where torch cannot be asked."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        return bool(c10d is not None and c10d.is_initialized())
    return False


def settle_at_exit() -> None:
    """Wait, as the last thing before the interpreter goes down, until gloo's threads hold nothing of Python any more.

    Takes 4 ms, at most 2 s, and no time where there are no such threads: a script may have destroyed its process group
    while one of ours is left. Who presses Ctrl-C meanwhile does not wait, and gets no traceback.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if _threads():
            _wait_until_idle()


def _wait_until_idle() -> None:
    """Wait for two looks in a row at which all of gloo's threads sleep.

    One is not enough: a thread that waits for the GIL sleeps too. It becomes runnable when the GIL is given up
    between the looks, and is seen as that until it had its turn, however loaded the machine is.
    """
    give_up = time.monotonic() + _AT_MOST_S
    idle = 0
    while idle < 2 and time.monotonic() < give_up:
        time.sleep(_PAUSE_S)
        idle = idle + 1 if _all_asleep() else 0


def _threads() -> list[Path]:
    with contextlib.suppress(OSError):  # a thread that ended meanwhile, or no /proc: nothing to wait for
        return [task for task in _TASKS.iterdir() if (task / "comm").read_text().rstrip() == _THREAD]
    return []


def _all_asleep() -> bool:
    with contextlib.suppress(OSError):
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in _threads())
    return True
