"""Where the starts of open blocks are after a pause that must not count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def is_inside(time_ns: int, passes: Iterable[tuple[int, int]]) -> bool:
    """Tell whether a time lies in one of some passes, each `(entered, left)` in nanoseconds."""
    return any(entered <= time_ns < left for entered, left in passes)


def moved_by_pause(starts: Iterable[int], pause_ns: int, now: int, passes: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return for each start when it would have been without the pause, which ends `now`; all in nanoseconds.

    The order of the starts is the stack, so it stays; none is in the future. `passes` are completed heartbeats: what
    started inside one was left behind there and is not moved, and what started outside comes to lie behind it rather
    than inside.
    """
    moved: dict[int, int] = {}
    latest = -1
    by_end = sorted(passes, key=lambda one: one[1])
    for start in sorted(starts):
        if is_inside(start, passes):
            moved[start] = start
            continue
        later = max(latest + 1, start + pause_ns)
        for entered, left in by_end:
            if entered <= later < left:
                later = left
        latest = moved[start] = min(now, later)
    return moved
