"""A request to leave that comes before there is anything that could leave: the launcher is still loading torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from resilience_sdk.errors import EXIT_PREEMPTED


@contextlib.contextmanager
def leaving_at_once(name: str) -> Iterator[None]:
    """Let the signal of that name end the process with 75 while nobody else handles it. Main thread only.

    By default it would end it with a code that tells a scheduler of a failure. No exception: the imports that it would
    be raised in may catch it.
    """
    number = getattr(signal, name)
    if signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, _leave)
    try:
        yield
    finally:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"resilience: asked to leave before the job began (exit code 75)\n")
    os._exit(EXIT_PREEMPTED)
