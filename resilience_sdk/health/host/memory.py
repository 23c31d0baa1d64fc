"""Memory: what is left of it, what may be used, kills for it, and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from resilience_sdk import cgroups, kernel_files
from resilience_sdk.health import grading
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import GIB, KIB, MIB, judged, size

PROBE = "host"
LEAST_MEMORY = 256 * MIB  # one process that imports torch takes about 220 MB
LOW_MEMORY = GIB
LOW_SHARE = 0.1
# NVIDIA's documentation of NCCL asks for `--shm-size=1g` in containers; NCCL makes a segment of 9 MiB and more for
# each pair of ranks, DataLoader workers put whole batches there.
LOW_SHM = GIB
LEAST_SHM = 16 * MIB
_OOM_CURE = "ask for more memory, or use less: fewer DataLoader workers, smaller prefetch, no copies per rank"


def memory(root: str = "/") -> Iterator[Finding]:
    """Yield how much memory this process and its children may still take."""
    info = {
        name: _bytes(value)
        for name, value in kernel_files.fields(kernel_files.below(root, "/proc/meminfo"), ":").items()
    }
    if "MemTotal" not in info or "MemAvailable" not in info:
        yield _unavailable("memory", "/proc/meminfo cannot be read")
        return
    total, free, limited_by = info["MemTotal"], info["MemAvailable"], "the machine's memory"
    for most, group in cgroups.limits(root, "memory", "memory.max", "memory.limit_in_bytes"):
        left = max(0, most - _used(group))
        if left < free:  # it may be a parent's: what other groups below it use counts too
            free, total, limited_by = left, most, f"the control group {group}"
    threshold = max(LOW_MEMORY, round(LOW_SHARE * total))
    status = grading.low(free, degraded=threshold, failed=LEAST_MEMORY)
    yield judged(
        probe=PROBE,
        check="memory_available",
        status=status,
        value=free,
        unit="bytes",
        threshold=threshold,
        evidence=f"{size(free)} of {size(total)} available, limited by {limited_by}",
        cure="end what holds it (`ps aux --sort=-rss | head`), or ask for more (`--mem` of the scheduler, "
        "`docker run --memory`)",
        must=True,
    )


def oom_kills(root: str = "/") -> Iterator[Finding]:
    """Yield how often the kernel has killed for memory: in our control group, and on the whole machine."""
    ours = cgroups.oom_kills(root)
    on_node = kernel_files.count(kernel_files.below(root, "/proc/vmstat"), "oom_kill")
    if ours is None and on_node is None:
        yield _unavailable("oom_kills", "neither the control group nor /proc/vmstat counts them")
        return
    count = on_node if ours is None else ours
    place = "on this machine since it started" if ours is None else "in this control group"
    also = f"; {on_node} on the machine since it started" if ours is not None and on_node is not None else ""
    is_bad = bool(ours)  # those of others on the machine are no fault of ours
    yield judged(
        probe=PROBE,
        check="oom_kills",
        status=Status.DEGRADED if is_bad else Status.OK,
        value=count,
        unit="kills",
        threshold=0 if ours is not None else None,
        evidence=f"{count} processes were killed for memory {place}{also}",
        cure=_OOM_CURE,
        data={
            "control_group": ours,
            "machine": on_node,
            **({} if ours is None else {"growth": {"per_minute": 0, "cure": _OOM_CURE}}),
        },
    )


def shared_memory(root: str = "/") -> Iterator[Finding]:
    """Yield how large /dev/shm is, and how much of it is free."""
    place = "/dev/shm"  # noqa: S108 - looked at, nothing is made there
    try:
        info = os.statvfs(kernel_files.below(root, place))
    except OSError as error:
        yield Finding(
            probe=PROBE,
            check="shared_memory",
            subject=place,
            status=Status.FAILED,
            evidence=f"cannot be used: {error.strerror}",
            cure=f"mount it: `mount -t tmpfs tmpfs {place}`; DataLoader workers and NCCL need it",
            must=True,
        )
        return
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    is_small = total < LOW_SHM
    status = max(
        grading.low(total, degraded=LOW_SHM, failed=LEAST_SHM),
        grading.low(free, degraded=LOW_SHM // 8, failed=LEAST_SHM),
        key=list(Status).index,
    )
    cure = (
        "give it more: `docker run --shm-size=8g` or `--ipc=host`, in Kubernetes an emptyDir with `medium: Memory`, "
        f"else `mount -o remount,size=8g {place}`; until then `num_workers=0`"
        if is_small
        else f"remove what earlier jobs left in it: `ls -la {place}`, `lsof {place}`"
    )
    yield judged(
        probe=PROBE,
        check="shared_memory",
        subject=place,
        status=status,
        value=total if is_small else free,
        unit="bytes",
        threshold=LOW_SHM if is_small else LOW_SHM // 8,
        evidence=f"{size(free)} of {size(total)} free",
        cure=cure,
        must=True,
        data={"total": total, "free": free},
    )


def _used(group: Path) -> int:
    """Return what counts against a group's limit and cannot be taken back at once.

    Its page cache can, that of files that were read more than once (`active`) too, which a training's data are.
    """
    used = kernel_files.number(group / "memory.current")
    if used is None:
        used = kernel_files.number(group / "memory.usage_in_bytes")
    statistics = kernel_files.fields(group / "memory.stat")
    prefix = "total_" if "total_inactive_file" in statistics else ""  # of the first version: with the groups below
    cache = sum(int(statistics.get(f"{prefix}{name}", "0")) for name in ("inactive_file", "active_file"))
    return max(0, (used or 0) - cache)


def _bytes(value: str) -> int:
    """Return the bytes of `24684096 kB`."""
    count, _, _ = value.partition(" ")
    return int(count) * KIB if count.isdecimal() else 0


def _unavailable(check: str, why: str) -> Finding:
    return Finding(probe=PROBE, check=check, status=Status.UNAVAILABLE, evidence=why)
