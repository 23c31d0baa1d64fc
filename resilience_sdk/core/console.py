"""The screen: the lines that the SDK has to say, and standard streams that cause no trouble.

Each line goes through a structlog logger of our own. It has nothing of the configuration that the user may have made of
structlog, which stays as it is, and no logger of `logging` is touched. structlog is loaded when the first line is said.
The same text is written without it where that would not be safe (the interpreter goes down, another thread or the code
that a signal interrupted is loading it) or would cost too much: the monitor stays small, a command that reads is quick.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.core import environ
from resilience_sdk.system import same_device

_PREFIX = "resilience: "
_LEAST_WIDTH = 40
_said: set[str] = set()
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


class _Log:
    """The logger of this process, and what each of its lines tells beside the message."""

    facts: dict[str, Any]
    """Rank, attempt and node, as far as they are known."""

    def __init__(self) -> None:
        self.facts = {}
        self.as_json = False
        self.may_load = True
        """Whether structlog may be loaded: once. False while that is done, so that nobody waits for it."""
        self.is_light = False
        self.unwritten: Path | None = None
        """The file for lines that standard error refuses."""
        self._loggers: dict[bool, Any] = {}

    def logger(self) -> Any:
        """Return structlog's logger in the form that was asked for, None where there is none."""
        if self.may_load and not sys.is_finalizing() and (self.as_json or not self.is_light):
            self.may_load = False
            import random

            # It loads rich where that is installed, which draws a number: the training's next one would be another.
            drawn = random.getstate()
            import structlog

            random.setstate(drawn)
            to_json = [
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(default=str),
                _as_line,
            ]
            self._loggers = {
                False: own_logger(_Screen(), [_as_text]),
                True: own_logger(_Screen(), [_without_layout, *to_json]),
            }
        logger = self._loggers.get(self.as_json)
        return None if logger is None else logger.bind(**self.facts)


class _Screen:
    """The last step of the logger: standard error."""

    def info(self, text: str) -> None:
        """Write one message."""
        _write(text)


_log = _Log()


def own_logger(end: Any, processors: Sequence[Callable[..., Any]]) -> Any:
    """Return a logger of structlog's that has nothing of the user's configuration; `end` takes what is rendered."""
    import structlog

    return structlog.wrap_logger(
        end,
        processors=processors,
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )


def bind(**facts: Any) -> None:
    """Have every later line of this process tell these facts: `rank`, `attempt`, `node`."""
    _log.facts = _log.facts | facts


def use_json(on: bool) -> None:
    """Have every later line be one JSON object, for what collects logs."""
    _log.as_json = on


def stay_light() -> None:
    """Write text without structlog, in a process that has to stay small or to answer at once."""
    _log.is_light = True


def say(message: str, *, wrap: bool = True) -> None:
    """Print `message` on standard error, one prefixed line per line; never raises.

    On a terminal long lines are wrapped between words; not so with `wrap=False`, for a command that is to be copied.
    """
    text = printable(message)
    with contextlib.suppress(Exception):  # whatever structlog is here, the line is said
        logger = _log.logger()
        if logger is not None:
            logger.info(text, wrap=wrap)
            return
    _write(_as_text(None, "", {"event": text, "wrap": wrap}))


def begin_line() -> None:
    """Leave one line empty, so that what follows stands on lines of its own behind output of others. Main thread."""
    if not _log.as_json:
        _write("\n")


def _as_text(_logger: object, _method: str, facts: dict[str, Any]) -> str:
    """Return a message as a person reads it, in one prefixed line per line."""
    lines = facts["event"].splitlines()
    if facts["wrap"] and (width := _terminal_width()):
        lines = [part for line in lines for part in _wrapped(line, width - len(_PREFIX))]
    return "".join(f"{_PREFIX}{line}\n" for line in lines)


def _without_layout(_logger: object, _method: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "wrap"}


def _as_line(_logger: object, _method: str, text: str) -> str:
    return f"{text}\n"


def keep_unwritten(path: Path) -> None:
    """Have every later line that standard error refuses go into this file: its reader left, or a disk is full."""
    _log.unwritten = path


def _write(text: str) -> None:
    _progress.clear()
    try:
        # A daemon thread that holds the stream's lock while the interpreter shuts down aborts the process.
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(RuntimeError):  # a signal handler that has interrupted another write
                sys.stderr.write(text)
                sys.stderr.flush()
                return
        os.write(2, text.encode(errors="replace"))
    except OSError:
        _append_unwritten(text)
    except (ValueError, AttributeError):
        pass


def _append_unwritten(text: str) -> None:
    if _log.unwritten is None:
        return
    with contextlib.suppress(OSError):
        same_device.check(_log.unwritten)
        _log.unwritten.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(_log.unwritten, flags, 0o600)
        try:
            os.write(fd, text.encode(errors="replace"))
        finally:
            os.close(fd)


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


_PROGRESS_AFTER_S = 2.0
_PROGRESS_EVERY_S = 0.25


class ProgressLine:
    """One line on standard error that tells what a command is at, while somebody waits for it for more than 2 seconds.

    Only on a terminal; it is gone before anything else is written, and at the end. Whoever does the work tells how far
    it is with `doing`, wherever that is; where nobody shows it, that costs next to nothing.
    """

    def __init__(self, after_s: float = _PROGRESS_AFTER_S) -> None:
        """Show nothing yet."""
        self._after_s = after_s
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_shown = False
        self._told: tuple[str, int | None, int | None] = ("", None, None)

    def start(self, what: str) -> None:
        """Begin to wait, on a terminal: `what` is done until somebody tells more. Once for each `stop`."""
        self._told = (what, None, None)
        is_dumb = environ.environment().get("TERM", "dumb") in ("dumb", "unknown", "")
        if is_dumb or _terminal_width() is None or self._thread is not None:
            return
        self._over.clear()
        self._thread = threading.Thread(target=self._show, name="resilience-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show nothing any more; the line is as it was before."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join()
            self.clear()

    def tell(self, what: str, done: int | None, of: int | None) -> None:
        """Note how far the work is."""
        self._told = (what, done, of)

    def clear(self) -> None:
        """Take the line away, for something else that is to be written."""
        if self._is_shown:
            with self._lock:
                self._is_shown = False
                self._put("\r\x1b[K")

    def _show(self) -> None:
        began_s = time.monotonic()
        wait_s = self._after_s
        while not self._over.wait(wait_s):
            wait_s = _PROGRESS_EVERY_S
            what, done, of = self._told
            share = "" if done is None else f" {done:,}" if of is None else f" {done:,} of {of:,}"
            text = f"{_PREFIX}{printable(what)}{share}, {time.monotonic() - began_s:.0f} s"
            with self._lock:
                if not self._over.is_set():
                    self._is_shown = True
                    self._put(f"\r\x1b[K{text[: (_terminal_width() or _LEAST_WIDTH) - 1]}")

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))


_progress = ProgressLine()


def doing(what: str, done: int | None = None, of: int | None = None) -> None:
    """Tell what this process is at and how far it is, for whoever waits for a command; costs next to nothing."""
    _progress.tell(what, done, of)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Show what is done in here, once it takes longer than 2 seconds, until the command prints something."""
    _progress.start(what)
    try:
        yield
    finally:
        _progress.stop()


def hide_progress() -> None:
    """Show no progress any more: what is asked for comes now."""
    _progress.stop()


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


_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Point those standard streams to /dev/null that the caller closed (`>&-`).

    Else the next file of ours gets the number, in the ranks too: what a C library prints would end up in a journal.
    """
    for number in range(len(_STREAMS)):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free: those below it are taken by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - to the end


def nobody_reads() -> bool:
    """Tell whether the reader of standard output or error has left."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def drop_unwritten() -> None:
    """Write what is left in standard output and error, and drop what cannot be written.

    Python would write it at exit, complain, and leave with 120 in place of the command's own exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
