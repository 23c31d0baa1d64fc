"""Bounds of what can be asked for on the command line: an endpoint, and how many ranks a machine can hold at the most.

Bounds for mistakes, not advice: whatever could run at all is within them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from resilience_sdk.errors import ConfigError

LAST_PORT = 65535
MASTER_PORT = 29500
_KIB_PER_RANK = 8 << 10
"""Memory that no Python process with torch does without, in KiB; measured are 14 MiB private to a forked rank."""
_THREADS_PER_RANK = 3
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def check_endpoint(endpoint: str, *, several: bool) -> None:
    """Refuse an endpoint that torch would find wrong only where the nodes meet, or not at all; `several` nodes do.

    Raises ConfigError. An empty one is none.
    """
    if not endpoint:
        return
    host, port = split_endpoint(endpoint)
    if not host:
        raise ConfigError(f"--rdzv-endpoint {endpoint!r}: expected HOST:PORT, and there is no host in it")
    if port is None:
        return
    if not port.isascii() or not port.isdecimal() or int(port) > LAST_PORT:
        raise ConfigError(
            f"--rdzv-endpoint {endpoint!r}: expected HOST:PORT with a port of 0 to {LAST_PORT}, such as "
            f"{_shown(host)}:{MASTER_PORT}"
        )
    if int(port) == 0 and several:
        raise ConfigError(
            f"--rdzv-endpoint {endpoint!r}: several nodes cannot meet at port 0, which is another one on each; name "
            f"one, such as {host}:{MASTER_PORT}"
        )


def check_master_address(address: str) -> None:
    """Refuse an address with a port in it, which has an option of its own; raises ConfigError."""
    if address.count(":") == 1:
        raise ConfigError(
            f"--master-addr {address!r}: expected a host or its address; the port is --master-port, such as "
            f"--master-addr {address.partition(':')[0]} --master-port {MASTER_PORT}"
        )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def split_endpoint(endpoint: str) -> tuple[str, str | None]:
    """Return host and port of `host:port`, `[v6]:port` or a host alone, whose port is None."""
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        return host, rest.removeprefix(":") if rest else None
    if endpoint.count(":") > 1:
        return endpoint, None  # an IPv6 address without brackets
    host, colon, port = endpoint.partition(":")
    return host, port if colon else None


def check_room(given: object, ranks: int, room: tuple[int, str]) -> None:
    """Refuse more ranks on a node than it has room for; raises ConfigError."""
    most, why = room
    if ranks > most:
        raise ConfigError(
            f"--nproc-per-node {given}: this machine has no room for so many ranks on one node, at most for {most} "
            f"({why}); give a smaller number, usually that of its GPUs"
        )


def room_for_ranks(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str]:
    """Return how many ranks this machine can hold at the most, and which limit says so."""
    found: list[tuple[int, str]] = []
    kib = _field(proc / "meminfo", "MemTotal:"), _field(proc / "meminfo", "SwapTotal:")
    if kib[0]:
        total = kib[0] + (kib[1] or 0)
        found.append((total // _KIB_PER_RANK, f"{total >> 20} GiB of memory and swap"))
    for name in ("kernel/pid_max", "kernel/threads-max"):
        if (number := _number(proc / "sys" / name)) is not None:
            found.append((number // _THREADS_PER_RANK, f"{name.replace('/', '.')} is {number}"))
    for path in _own_groups(proc, cgroups):
        if (number := _number(path / "pids.max")) is not None:
            found.append((number // _THREADS_PER_RANK, f"{path / 'pids.max'} is {number}"))
    if (number := _user_limit()) is not None:
        found.append((number // _THREADS_PER_RANK, f"this user may have {number} processes, ulimit -u"))
    most, why = min(found, default=(1 << 16, "65536 whatever the machine"))
    return max(1, most), why


def _own_groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the directories of this process's control group and of those above it, whose limits are its own, too."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers in ("", "pids"):
                own = (cgroups / controllers).joinpath(place.lstrip("/"))
                return [path for path in (own, *own.parents) if path.is_relative_to(cgroups)]
    return []


def _user_limit() -> int | None:
    try:
        import resource

        if os.geteuid() == 0:
            return None  # does not hold for root
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    except (ImportError, OSError, AttributeError):
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def _field(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
