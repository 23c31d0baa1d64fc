"""The one line that a person sees when the SDK has something to say.

Plain writes to standard error and no logging configuration: a library must not touch the user's loggers,
and the torch-free monitor cannot afford one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_PREFIX = "resilience: "
_said: set[str] = set()
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


def say(message: str) -> None:
    """Print `message` on standard error, one prefixed line per line; never raises."""
    text = "".join(f"{_PREFIX}{line}\n" for line in printable(message).splitlines())
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if threading.current_thread() is not threading.main_thread():
            # A daemon thread that holds the stream's lock while the interpreter shuts down aborts the process.
            os.write(2, text.encode(errors="replace"))
            return
        sys.stderr.write(text)
        sys.stderr.flush()


def say_once(key: str, message: str) -> bool:
    """Print `message` unless something was already said under `key` in this process; tell whether it printed."""
    with _lock:
        if key in _said:
            return False
        _said.add(key)
    say(message)
    return True


def printable(text: str) -> str:
    """Replace control characters, so that text from a job cannot steer the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
