"""Scales of a picture: positions, round ticks and short words for numbers, times and sizes. Pure.

Whatever a job measured may come in, so every function takes any float and returns finite numbers and short texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from resilience_sdk.core.words import duration, when

_LARGEST = 1e300
_SMALLEST_SPAN = 1e-9  # of the larger end: below that ticks would fall together
_ELAPSED_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400),
)  # fmt: skip
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


def finite(values: Iterable[float | None]) -> list[float]:
    """Return those that are numbers and not infinite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def share_of(value: float, low: float, high: float) -> float:
    """Return where a value stands between two others, 0 to 1; beyond them it stands at the end."""
    if not high > low:
        return 0.0
    share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves, as the difference of the largest is infinite
    return min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Return round numbers at equal distances: the first is at or below `low`, the last at or above `high`."""
    low, high = (min(_LARGEST, max(-_LARGEST, end)) for end in (min(low, high), max(low, high)))
    span = max(high - low, _SMALLEST_SPAN * max(abs(low), abs(high)))
    if span < 1 / _LARGEST:
        high, span = low + 1.0, 1.0
    magnitude = math.floor(math.log10(span / max(1, most - 1)))
    for factor in (1, 2, 5, 10, 20):
        step = factor * 10.0**magnitude
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < most:
            break
    # 3 * 0.1 is 0.30000000000000004: the digits of a tick end where those of the step do.
    found = [float(f"{number * step:.12g}") for number in range(first, max(last, first + 1) + 1)]
    return (min(found[0], low), *found[1:-1], max(found[-1], high))


def time_ticks(seconds: float, most: int = 7) -> tuple[float, ...]:
    """Return round times from 0 up to `seconds`, for an axis of elapsed time that ends there."""
    if not 0 < seconds < _LARGEST:
        return (0.0,)
    step: float = next((step for step in _ELAPSED_STEPS if seconds / step <= most), 0)
    if not step:
        step = 86400 * max(1.0, float(ticks(0, seconds / 86400, most)[1]))
    return tuple(number * step for number in range(int(seconds / step + 1e-9) + 1))


def elapsed(seconds: float) -> str:
    """Return a length of time in its two largest units, short: `1h 10m`, `45s`, `53.2ms`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return f"-{elapsed(-seconds)}"
    if seconds < 1:
        return "0" if seconds == 0 else f"{seconds * 1000:.3g}ms" if seconds < 0.9995 else "1s"
    if seconds < 59.95:
        return f"{seconds:.3g}s"
    rest = round(seconds)
    for index, (size, unit) in enumerate(_UNITS):
        if rest >= size:
            below, name = (*_UNITS, (1, "s"))[index + 1]
            lower = rest % size // below
            return f"{rest // size}{unit} {lower}{name}" if lower else f"{rest // size}{unit}"
    return f"{rest}s"


def number(value: float | None) -> str:
    """Return a number with three digits, and `k`, `M` or `G` where it is large."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e3 * size:
            return f"{value / size:.3g}{unit}" if abs(value) >= 1e4 or value % 1 else f"{value:.0f}"
    return f"{value:.3g}"


def quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit; seconds as `elapsed` has them."""
    if value is None:
        return "-"
    return elapsed(value) if unit == "s" else f"{number(value)} {unit}".strip()


def percent(share: float | None) -> str:
    """Return a share with one digit behind the point; small ones are told from none."""
    if share is None or not math.isfinite(share):
        return "-"
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def size(count: float | None) -> str:
    """Return bytes in the unit that leaves three digits."""
    if count is None or not math.isfinite(count):
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def clock(unix_s: float | None) -> str:
    """Return Unix time as the date and time of this machine, as all commands do; empty where it is unknown."""
    told = when(unix_s)
    return "" if told == when(None) else told


def zone(unix_s: float) -> str:
    """Return the zone of `clock`, such as `CET, +01:00`."""
    try:
        there = time.localtime(unix_s)
    except (OverflowError, ValueError, OSError):
        there = time.localtime(0)
    minutes = abs(there.tm_gmtoff) // 60
    return f"{there.tm_zone}, {'-' if there.tm_gmtoff < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}"


def iso(unix_s: float) -> str | None:
    """Return Unix time as machines read it; None where it is none."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return None


def spoken(seconds: float | None) -> str:
    """Return a duration for a table: as all commands have it, and milliseconds below a second."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    return f"{seconds * 1000:.3g} ms" if 0 < abs(seconds) < 0.95 else duration(seconds)


def upper_end(values: Sequence[float]) -> float:
    """Return up to where an axis should go: not to a single value that would press all others flat."""
    ordered = sorted(values)
    most, usual = ordered[-1], ordered[int(0.97 * (len(ordered) - 1))]
    return 1.5 * usual if len(ordered) >= 20 and usual > 0 and most > 6 * usual else most
