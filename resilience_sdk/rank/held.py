"""The holder of a rank's process whose script has ended, as the helper thread sees it, which still runs then."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.recorder import page_layout as at

SUFFIX = ".held.json"
_DESTROYING = "destroy_process_group"
_MAX_FRAMES = 50
_MAX_THREADS = 20
_SETTLED_S = 1.0


def call_at_shutdown(function: Callable[[], None]) -> None:
    """Have `function` called when the interpreter begins to go down, before it waits for threads; where that is known.

    `atexit` would come too late: a thread that is no daemon is waited for before it. concurrent.futures uses the same.
    """
    with contextlib.suppress(Exception):
        threading._register_atexit(function)  # type: ignore[attr-defined]


class ExitTeller:
    """Keeps the words of the page about the end of the script, and the file about what holds it. Helper thread."""

    def __init__(self, words: memoryview[int], stem: Path) -> None:
        """Write `words` of the page, and a file beside it."""
        self._words = words
        self._stem = stem
        self._told: Any = None

    def look(self) -> None:
        """Note whether the process group is being destroyed, and write what holds the process where it should end."""
        main = _frames(threading.main_thread().ident)
        since_ns, now_ns = self._words[at.W_DESTROYING_NS], time.monotonic_ns()
        if any(frame.endswith(f" {_DESTROYING}") for frame in main):
            self._words[at.W_DESTROYING_NS] = since_ns = since_ns or now_ns
        elif since_ns:
            self._words[at.W_DESTROYING_NS] = since_ns = 0
        since_ns = self._words[at.W_OVER_NS] or since_ns
        if not since_ns or now_ns - since_ns < _SETTLED_S * 1e9:
            return
        threads = [
            {"name": thread.name, "frames": _frames(thread.ident)}
            for thread in threading.enumerate()
            if not thread.daemon and thread is not threading.main_thread() and thread.is_alive()
        ][:_MAX_THREADS]
        told = {"main": main, "threads": threads}
        if told != self._told:
            write_whole(self._stem.with_suffix(SUFFIX), json.dumps(told))
            self._told = told


def _frames(ident: int | None) -> list[str]:
    """Return the frames of a thread, innermost first."""
    frame: FrameType | None = sys._current_frames().get(ident or 0)
    found: list[str] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        code = frame.f_code
        found.append(f"{code.co_filename}:{frame.f_lineno or 0} {code.co_name}")
        frame = frame.f_back
    return found
