"""What a journal may hold and others do not take: texts that are no UTF-8, numbers that are none, odd times.

A sink that could not write such a value would fail at it for ever, and everything behind it would wait.
"""

from __future__ import annotations

import math
from typing import Any

_LAST_S = 4e9  # in the year 2096


def clean_text(text: str, most: int) -> str:
    """Return a text as one printable line of at most `most` characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:most])


def clean_time(seconds: float) -> float:
    """Return a Unix time that every clock can show."""
    return min(max(seconds, 0.0), _LAST_S)


def clean_json(value: Any) -> Any:
    """Return a JSON value without NaN and infinities, which are Python's own: they become texts."""
    if isinstance(value, dict):
        return {key: clean_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def amount(value: object) -> float | None:
    """Return a finite number that is 0 or more; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
