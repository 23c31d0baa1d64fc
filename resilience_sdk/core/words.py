"""Words for numbers and texts of a job, as every page and screen of the SDK has them."""

from __future__ import annotations

import time

from resilience_sdk.core.console import printable

_MOST_CHARACTERS = 400
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def one_line(text: object) -> str:
    """Return job text as one line of bounded length, without control characters."""
    flat = " ".join(printable(str(text)).split())
    return flat if len(flat) <= _MOST_CHARACTERS else flat[:_MOST_CHARACTERS] + " ... (cut)"


def when(unix_s: float | None) -> str:
    """Return Unix time as local date and time, or `at an unknown time`."""
    try:
        if unix_s is not None:
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        pass
    return "at an unknown time"


def clock_time(unix_s: float, now: float) -> str:
    """Return Unix time as local time of the day, with its date where that is not the one of `now`."""
    text = when(unix_s)
    day, _, clock = text.partition(" ")
    return clock if when(now).startswith(f"{day} ") else text


def counted(number: int, name: str) -> str:
    """Return an amount of things: `1 run`, `41 runs`."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def ago(unix_s: float | None, now: float) -> str:
    """Return how long ago a Unix time was, in one unit."""
    if unix_s is None:
        return "never"
    passed = max(0.0, now - unix_s)
    for unit, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * seconds:
            return f"{passed / seconds:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


def duration(seconds: float) -> str:
    """Return a duration as a person would say it, with three or four digits."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.1f} days"


def size(count: float) -> str:
    """Return bytes as a person reads them: `64 MiB`, `1.5 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


def thing_words(probe: str, check: str, subject: str = "", *, between: str = " ") -> str:
    """Name what was looked at as a person does: `gpu answers GPU 1`, `kernel log storage_io_error`; each word once.

    `between` stands behind the probe.
    """
    prefix = "" if probe.removesuffix("s") in check else f"{probe}{between}"
    return prefix + " ".join(filter(None, (check.replace("_", " "), subject)))
