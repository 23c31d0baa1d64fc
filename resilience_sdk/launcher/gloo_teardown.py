"""One deadlock of torch that forked workers meet, kept from happening.

torch 2.13 hands each gloo collective of a backward pass the caller's `contextvars` context. The last owner of
the work, often gloo's own thread, needs the GIL to let go of it. If the last reference to the process group
goes meanwhile - DDP's reducer holds one, and goes when the training function returns - its destructor joins
that thread while it holds the GIL, and neither ever ends.

A process that was started by exec loses the race hardly ever. In a forked one, whose threads begin with page
faults, a fourth of all short DDP runs hung at their end (docs/design.md has the count).
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

_PAUSE_S = 0.02
"""Thousands of times what the thread needs, and nothing beside a process's end."""


def let_threads_finish() -> None:
    """Let `destroy_process_group` give up the GIL for a moment before it begins. Call before user code.

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
        time.sleep(_PAUSE_S)
        return destroy(*args, **kwargs)

    c10d.destroy_process_group = distributed.destroy_process_group = destroy_process_group
