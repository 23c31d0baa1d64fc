"""Whether the start that stands in the page directory has ended: a process may call `mp.spawn` again."""

from __future__ import annotations

import os
import time
from pathlib import Path

from resilience_sdk import hostinfo
from resilience_sdk.rank_page import PageReader, RankSnapshot, parse_stem


def is_over(pages: Path, attempt: int, began_ns: int, *, but: int) -> bool:
    """Tell whether the start that began then (monotonic) had ranks, all have ended, and this process is none of them.

    `but`: a process that does not count, since it started them. The ranks of one start are processes before the first
    of them has a page; so whoever was started after that is none of them. Where start times are unknown, False.
    """
    started_ns = _started_ns(os.getpid())
    newest_ns = 0
    for path in pages.glob(f"a{attempt}-r*.page"):
        stem = parse_stem(path.stem)
        if stem is None or stem[2] == but:
            continue
        page = read_page(path)
        if page is None or page.created_ns < began_ns:
            continue
        if not hostinfo.process_is_gone(page.pid, page.start_ticks):
            return False
        newest_ns = max(newest_ns, page.created_ns)
    return started_ns is not None and 0 < newest_ns < started_ns


def read_page(path: Path) -> RankSnapshot | None:
    """Return what a page says now, or None for one that cannot be read."""
    try:
        reader = PageReader(path)
    except OSError:
        return None
    try:
        return reader.snapshot()
    finally:
        reader.close()


def _started_ns(pid: int) -> int | None:
    """Return when a process was started, on the monotonic clock; a tick early at most."""
    ticks = hostinfo.process_start_ticks(pid)
    if ticks is None:
        return None
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    # The kernel counts the time that the machine was suspended, the monotonic clock does not.
    return since_boot_ns - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns())
