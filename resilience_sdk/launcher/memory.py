"""Whether the kernel killed a process of this job for memory: the counter of our control group."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """Return how many processes of this control group were killed for memory; None when nobody counts."""
    for directory in (_own_group(), _CGROUPS):
        if directory is None:
            continue
        for name, key in (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill")):
            count = _counter(directory / name, key)
            if count is not None:
                return count
    return None


def _own_group() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            return _CGROUPS / path.lstrip("/")
        if "memory" in controllers.split(","):
            return _CGROUPS / "memory" / path.lstrip("/")
    return None


def _counter(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return None
