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
_LEAST_WIDTH = 40
_said: set[str] = set()
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


def say(message: str, *, wrap: bool = True) -> None:
    """Print `message` on standard error, one prefixed line per line; never raises.

    On a terminal long lines are wrapped between words; not so with `wrap=False`, for a command that is to be copied.
    """
    lines = printable(message).splitlines()
    if wrap and (width := _terminal_width()):
        lines = [part for line in lines for part in _wrapped(line, width - len(_PREFIX))]
    text = "".join(f"{_PREFIX}{line}\n" for line in lines)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if threading.current_thread() is not threading.main_thread():
            # A daemon thread that holds the stream's lock while the interpreter shuts down aborts the process.
            os.write(2, text.encode(errors="replace"))
            return
        sys.stderr.write(text)
        sys.stderr.flush()


def _terminal_width() -> int | None:
    try:
        return os.get_terminal_size(2).columns if os.isatty(2) else None
    except OSError:
        return None


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width or width < _LEAST_WIDTH:
        return [line]
    import textwrap  # late: few processes have a terminal

    indent = " " * (len(line) - len(line.lstrip()) + 2)
    parts = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return parts or [line]


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
