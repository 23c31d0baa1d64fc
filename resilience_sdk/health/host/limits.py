"""Limits of this process and of the kernel: open files, processes and threads, locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from resilience_sdk import cgroups, kernel_files
from resilience_sdk.health import grading
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import MIB, judged, size

PROBE = "host"
LEAST_FILES = 256  # importing torch and one gloo group of a few ranks come near it
LOW_FILES = 1024
FILES_BESIDE = 512  # libraries, data files, checkpoints, DataLoader workers
FILES_PER_RANK = 8  # rank 0 holds a connection of the store for each rank, gloo one for each pair and group
LEAST_PROCESSES = 64
PROCESSES_PER_RANK = 256  # threads count: OpenMP, NCCL, DataLoader workers
MOST_OF_FILE_TABLE = 0.9
_CAP_IPC_LOCK = 14
_LIMIT = re.compile(r"^(?P<name>.+?)\s{2,}(?P<soft>\S+)\s+(?P<hard>\S+)", re.MULTILINE)


def open_files(root: str, world_size: int) -> Iterator[Finding]:
    """Yield how many files a process may have open."""
    soft, hard = _limit(root, "Max open files")
    if soft is None:
        yield Finding(probe=PROBE, check="open_files", status=Status.UNAVAILABLE, evidence="/proc/self/limits")
        return
    threshold = max(LOW_FILES, FILES_BESIDE + FILES_PER_RANK * world_size)
    status = grading.low(soft, degraded=threshold, failed=LEAST_FILES)
    enough = hard is not None and hard >= threshold
    cure = (
        f"`ulimit -n {_shown(hard)}` in the job's script, before the launcher"
        if enough
        else "raise the hard limit: `docker run --ulimit nofile=1048576`, `LimitNOFILE=` of the scheduler's service, "
        "or /etc/security/limits.conf"
    )
    yield judged(
        probe=PROBE,
        check="open_files",
        status=status,
        value=_shown(soft),
        unit="files",
        threshold=threshold,
        evidence=f"`ulimit -n` is {_shown(soft)}, it may be raised to {_shown(hard)}",
        cure=cure,
        must=True,
    )


def file_table(root: str) -> Iterator[Finding]:
    """Yield how full the table of open files of the whole machine is."""
    words = (kernel_files.text(kernel_files.below(root, "/proc/sys/fs/file-nr")) or "").split()
    if len(words) != 3 or not int(words[2]):
        return
    used, most = int(words[0]), int(words[2])
    status = grading.high(used / most, degraded=MOST_OF_FILE_TABLE)
    yield judged(
        probe=PROBE,
        check="file_table",
        status=status,
        value=used,
        unit="files",
        threshold=round(MOST_OF_FILE_TABLE * most),
        evidence=f"{used} files are open on the machine, it can have {most}",
        cure="find who holds them (`lsof | cut -c1-20 | sort | uniq -c | sort -n`)",
    )


def processes(root: str, local_ranks: int) -> Iterator[Finding]:
    """Yield how many processes and threads may still be started; the smaller of our limit and our control group's."""
    found: list[tuple[int, str]] = []
    for most, group in cgroups.limits(root, "pids", "pids.max"):
        found.append(
            (most - (kernel_files.number(group / "pids.current") or 0), f"pids.max of the control group {group}")
        )
    soft, _ = _limit(root, "Max processes")
    if soft is not None and soft != float("inf"):
        # How many this user already has cannot be told from one container: the limit itself is what is known.
        found.append((int(soft), "`ulimit -u`"))
    threshold = PROCESSES_PER_RANK * local_ranks
    left, source = min(found, default=(None, ""))
    status = Status.OK if left is None else grading.low(left, degraded=threshold, failed=LEAST_PROCESSES)
    yield judged(
        probe=PROBE,
        check="processes",
        status=status,
        value=left,
        unit="processes and threads",
        threshold=threshold,
        evidence="not limited" if left is None else f"{left} may be started, by {source}",
        cure="raise it (`ulimit -u`, `docker run --pids-limit`, TasksMax of the service), or use fewer workers",
        must=True,
    )


def locked_memory(root: str) -> Iterator[Finding]:
    """Yield whether the memory of RDMA transfers may be locked; nothing on a machine without such a device."""
    if not kernel_files.entries(kernel_files.below(root, "/sys/class/infiniband")):
        return
    soft, _ = _limit(root, "Max locked memory")
    may = int(kernel_files.fields(kernel_files.below(root, "/proc/self/status"), ":").get("CapEff") or "0", 16)
    if soft is None:
        return
    is_free = soft == float("inf") or bool(may >> _CAP_IPC_LOCK & 1)
    status = Status.OK if is_free else grading.low(soft, degraded=1024 * MIB, failed=64 * MIB)
    yield judged(
        probe=PROBE,
        check="locked_memory",
        status=status,
        value=_shown(soft),
        unit="bytes",
        evidence="not limited" if is_free else f"`ulimit -l` is {size(soft)}, RDMA registers all that it transfers",
        cure="`ulimit -l unlimited`; `docker run --ulimit memlock=-1`; LimitMEMLOCK=",
    )


def _limit(root: str, name: str) -> tuple[float | None, float | None]:
    """Return the soft and hard limit of /proc/self/limits, infinite where there is none."""
    for match in _LIMIT.finditer(kernel_files.text(kernel_files.below(root, "/proc/self/limits")) or ""):
        if match["name"] == name:
            return _value(match["soft"]), _value(match["hard"])
    return None, None


def _value(word: str) -> float | None:
    return float("inf") if word == "unlimited" else int(word) if word.isdecimal() else None


def _shown(limit: float | None) -> int | str:
    return "unknown" if limit is None else "unlimited" if limit == float("inf") else int(limit)
