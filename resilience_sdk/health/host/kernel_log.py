"""What the kernel has said of this node's hardware and storage, by the rules that read logs of failed jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

import attrs

from resilience_sdk import kernel_files
from resilience_sdk.attribution.signatures import read_line
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "kernel"
KERNEL_LOG = "/dev/kmsg"
# A fault of the node outlives the job that met it; anything else was perhaps that job's own doing.
NODE_CATEGORIES = frozenset({"hardware", "network", "storage"})
RECENT_S, RECENT_OF_JOBS_S = 24 * 3600.0, 3600.0
_MOST_RECORDS = 20_000
_RECORD_BYTES = 8192  # the kernel gives one record a read, and none is longer
# A sign that only follows from another fault, or only hints at one, is no reason to distrust a node.
_ROLE = "proof"
_CURE = {
    "exclude_node": "drain the node until it was repaired or reset (`dmesg -T`), or start without it",
    "wait": "see to the storage (`dmesg -T`, the file server), then start",
    "restart": "no cure is needed for one of these; if it comes again, see `dmesg -T`",
}


@attrs.frozen
class Record:
    """One message of the kernel, and how many seconds ago it was written."""

    age_s: float
    text: str


def records(root: str) -> Iterator[Record]:
    """Yield what the kernel's log holds, oldest first.

    Raises:
        OSError: It may not be read.
    """
    uptime = (kernel_files.text(kernel_files.below(root, "/proc/uptime")) or "0").split()
    now_s = float(uptime[0])
    fd = os.open(kernel_files.below(root, KERNEL_LOG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_MOST_RECORDS):
            try:
                data = os.read(fd, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # overwritten by newer ones; the next read goes on with those
            except BlockingIOError:
                return
            if not data:
                return
            yield from _parse(data, now_s)
    finally:
        os.close(fd)


def _parse(data: bytes, now_s: float) -> Iterator[Record]:
    """Yield the messages of lines `priority,sequence,microseconds,flags;message`; others are details of theirs."""
    for line in data.decode(errors="replace").splitlines():
        head, semicolon, message = line.partition(";")
        numbers = head.split(",")
        if semicolon and len(numbers) >= 3 and numbers[2].isdecimal():
            yield Record(now_s - int(numbers[2]) / 1e6, message)


def kernel_faults(log: Iterable[Record], now: float = 0.0) -> Iterator[Finding]:
    """Yield one finding for each cause that the taxonomy sees in the log, or one that there is none. Pure.

    `now` is the Unix time from which the ages of the records count.
    """
    seen: dict[str, list[Record]] = {}
    count = 0
    for record in log:
        count += 1
        reading_ = read_line(record.text)
        if reading_ is not None and reading_.role == _ROLE:
            seen.setdefault(reading_.cause, []).append(record)
    if not seen:
        yield Finding(
            probe=PROBE, check="kernel_log", status=Status.OK, value=0, unit="faults", evidence=f"{count} messages read"
        )
    for name, lines in seen.items():
        yield _fault(name, lines, now)


def _fault(name: str, lines: list[Record], now: float) -> Finding:
    cause, newest = lookup(name), min(lines, key=lambda record: record.age_s)
    is_recent = newest.age_s <= (RECENT_S if cause.category in NODE_CATEGORIES else RECENT_OF_JOBS_S)
    is_lasting = cause.action == "exclude_node" and cause.persistence == "persistent"
    status = Status.OK if not is_recent else Status.FAILED if is_lasting else Status.DEGRADED
    return judged(
        probe=PROBE,
        check="kernel_log",
        subject=name,
        status=status,
        value=len(lines),
        unit="messages",
        threshold=0,
        evidence=f"{cause.meaning}; the last one {_ago(newest.age_s)}: {newest.text.strip()[:300]}",
        cure=_CURE.get(cause.action, "see `dmesg -T`"),
        data={"cause": name, "category": cause.category, "at": round(now - newest.age_s, 3)},
    )


def _ago(age_s: float) -> str:
    for unit, seconds in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return f"{max(0.0, age_s):.0f} s ago"


def kernel_log(root: str, newer_s: float | None = None) -> Iterator[Finding]:
    """Yield what the kernel's log says (of its last `newer_s` seconds), or why it cannot be read."""
    try:
        now = time.time()
        new = (record for record in records(root) if newer_s is None or record.age_s <= newer_s)
        yield from kernel_faults(new, now)
    except OSError as error:
        yield Finding(
            probe=PROBE,
            check="kernel_log",
            status=Status.UNAVAILABLE,
            evidence=f"{KERNEL_LOG} cannot be read: {error.strerror}",
            cure="`sysctl kernel.dmesg_restrict=0`, or run the doctor once as root (in a container: on its host)",
        )
