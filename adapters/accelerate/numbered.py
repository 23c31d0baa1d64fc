"""The numbered checkpoints of Accelerate (`checkpoint_0`, `checkpoint_1`, ...): which to load or remove. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def number_of(name: str) -> int | None:
    """Return the number in the name of a directory, None if it is no such name."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


def in_order(names: Iterable[str]) -> list[str]:
    """Return those of the names that are numbered, the oldest first."""
    found = [(number, name) for name in names if (number := number_of(name)) is not None]
    return [name for _, name in sorted(found)]


def to_remove(names: Iterable[str], limit: int | None) -> list[str]:
    """Return which to remove so that `limit` stay, one at the least; None = all stay."""
    return [] if limit is None else in_order(names)[: -max(limit, 1)]
