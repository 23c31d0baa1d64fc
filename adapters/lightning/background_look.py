"""A look at the run directory now and then, on a thread of its own: a disk may hang, and training must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_LAST_S = 2.0


class BackgroundLook(Generic[T]):
    """Calls `look` every `period_s` seconds until `end`; `newest` is what it has returned last, and costs nothing."""

    def __init__(self, look: Callable[[], T], period_s: float, first: T) -> None:
        """Begin with `first`, and look for the first time after one period."""
        self.newest = first
        self._look = look
        self._period_s = period_s
        self._due, self._looked = threading.Event(), threading.Event()
        self._is_over = False
        threading.Thread(target=self._run, name="resilience-look", daemon=True).start()

    def end(self) -> T:
        """Look once more, for two seconds at most, and never again; return what is known then. May be repeated."""
        if not self._is_over:
            self._is_over = True
            self._due.set()
            self._looked.wait(_LAST_S)
        return self.newest

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._due.wait(self._period_s)
            is_last = self._is_over
            with suppress(Exception):  # it is looked at again, and training has no part in it
                self.newest = self._look()
            if is_last:
                self._looked.set()
