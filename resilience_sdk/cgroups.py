"""The control groups that this process is in, version 2 and 1, from its own up to the root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from resilience_sdk import kernel_files

_NO_LIMIT = 1 << 60  # version 1 writes a huge number where there is no limit


def groups(root: str, controller: str) -> Iterator[Path]:
    """Yield the directories of the groups that limit this process, innermost first.

    In a container the path that the kernel names may not be there: then the visible root is its group.
    """
    base = kernel_files.below(root, "/sys/fs/cgroup")
    places: list[Path] = []
    for line in (kernel_files.text(kernel_files.below(root, "/proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            places += [place / path.lstrip("/") for place in (base, base / "unified")]
        elif controller in controllers.split(","):
            places += [base / name / path.lstrip("/") for name in dict.fromkeys((controller, controllers))]
    seen: set[Path] = set()
    for place in [*places, base / controller, base]:
        while place.is_relative_to(base):
            if place not in seen and place.is_dir():
                seen.add(place)
                yield place
            place = place.parent


def limits(root: str, controller: str, *names: str) -> list[tuple[int, Path]]:
    """Return each limit that stands in a file of one of these names, and the group that has it, innermost first."""
    return [
        (limit, group)
        for group in groups(root, controller)
        for name in names
        if (limit := kernel_files.number(group / name)) is not None and limit < _NO_LIMIT
    ]


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes of this process's group were killed for memory; None where nobody counts."""
    for group in groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (kills := kernel_files.count(group / name, "oom_kill")) is not None:
                return kills
    return None
