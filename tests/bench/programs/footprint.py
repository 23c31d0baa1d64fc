"""Makes steps of `everything.py` without work, and marks each by a store to `MARKS`; for `tests.bench.footprint`."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable

from everything import Empty, step_with_all, step_with_blocks, step_without

from resilience_sdk import heartbeat

MARKS = 0x600000000000  # nothing lies there by itself
_WARMING, _TRACED = 60, 6


def mark(number: int) -> None:
    """Store a byte at the address of that mark."""
    ctypes.c_uint8.from_address(MARKS + number).value = 1


def main() -> None:
    """Mark the begin (0 to 7) and the end (8 to 15) of each kind of step."""
    _map_marks()
    steps: list[Callable[[], object]] = [
        make(lambda: None)
        for make in (
            step_without,
            lambda step: step_with_blocks(step, Empty()),
            lambda step: step_with_blocks(step, threading.RLock()),
            step_with_all,
        )
    ]
    for _ in range(_WARMING):
        for step in steps:
            step()
            mark(0)  # what marking needs is warm too
            mark(8)
    for _ in range(_TRACED):
        for kind, step in enumerate(steps):
            mark(kind)
            step()
            mark(8 + kind)
    heartbeat.done()


def _map_marks() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    if libc.mmap(MARKS, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != MARKS:
        sys.exit(f"nothing can be mapped at {MARKS:#x}: errno {ctypes.get_errno()}")


if __name__ == "__main__":
    main()
