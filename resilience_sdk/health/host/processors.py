"""Processors: how many this process may use, how busy they are, and how long tasks stall for memory and storage."""

from __future__ import annotations

import re
from collections.abc import Iterator

from resilience_sdk import cgroups, kernel_files
from resilience_sdk.health import grading
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "host"
MOST_LOAD = 1.5  # runnable and blocked tasks for each processor
# Share of the last minute in which every task that was not idle waited (the kernel's PSI, `full avg60`).
MOST_STALLED_PERCENT = {"memory": 10.0, "io": 40.0}


def load(root: str) -> Iterator[Finding]:
    """Yield how many tasks there are for each processor of the machine."""
    words = (kernel_files.text(kernel_files.below(root, "/proc/loadavg")) or "").split()
    cpus = count_list(kernel_files.text(kernel_files.below(root, "/sys/devices/system/cpu/online")) or "")
    if not words or not cpus:
        yield Finding(probe=PROBE, check="load", status=Status.UNAVAILABLE, evidence="/proc/loadavg cannot be read")
        return
    each = float(words[0]) / cpus
    status = grading.high(each, degraded=MOST_LOAD)
    yield judged(
        probe=PROBE,
        check="load",
        status=status,
        value=round(each, 2),
        unit="tasks per processor",
        threshold=MOST_LOAD,
        evidence=f"{words[0]} tasks in the last minute on {cpus} processors",
        cure="see who computes (`top -b -n 1 | head -20`): what an earlier job left, other jobs, or too many workers",
    )


def processor_model(root: str = "/") -> str:
    """Return what the first processor calls itself, empty where it does not."""
    named = re.search(
        r"^model name\s*:\s*(.+)$", kernel_files.text(kernel_files.below(root, "/proc/cpuinfo")) or "", re.M
    )
    return named[1].strip() if named else ""


def processors(root: str, local_ranks: int) -> Iterator[Finding]:
    """Yield how many processors the ranks of this node have."""
    allowed = kernel_files.fields(kernel_files.below(root, "/proc/self/status"), ":").get("Cpus_allowed_list", "")
    count: float = count_list(allowed)
    if not count:
        yield Finding(probe=PROBE, check="processors", status=Status.UNAVAILABLE, evidence="/proc/self/status")
        return
    limited_by = f"the processors {allowed}"
    if (quota := _quota(root)) is not None and quota < count:
        count, limited_by = quota, "the quota of the control group"
    status = grading.low(count, degraded=local_ranks)
    yield judged(
        probe=PROBE,
        check="processors",
        status=status,
        value=round(count, 2),
        unit="processors",
        threshold=local_ranks,
        evidence=f"{count:g} for {local_ranks} ranks on this node, limited by {limited_by}",
        cure="ask for more (`--cpus-per-task`, `docker run --cpus`), or start fewer ranks on this node",
    )


def stalls(root: str) -> Iterator[Finding]:
    """Yield how long tasks stood still for memory and for storage, where the kernel counts that."""
    for resource, most in MOST_STALLED_PERCENT.items():
        match = re.search(
            r"^full .*avg60=([\d.]+)",
            kernel_files.text(kernel_files.below(root, f"/proc/pressure/{resource}")) or "",
            re.M,
        )
        if match is None:
            continue
        percent = float(match[1])
        status = grading.high(percent, degraded=most)
        cure = (
            "free memory: what runs here swaps or waits for pages to be taken back"
            if resource == "memory"
            else "see who reads and writes (`iotop -o`), and `resilience doctor` on the storage server's other clients"
        )
        yield judged(
            probe=PROBE,
            check="stalled",
            subject=resource,
            status=status,
            value=percent,
            unit="% of the last minute",
            threshold=most,
            evidence=f"all tasks waited for {resource} during {percent:g} % of the last minute",
            cure=cure,
        )


def count_list(text: str) -> int:
    """Return how many processors a kernel list such as `0-3,8` names; 0 for anything else."""
    count = 0
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return 0
        count += int(last) - int(first) + 1 if dash else 1
    return count


def _quota(root: str) -> float | None:
    """Return how many processors' time the control groups allow, None where that is not limited."""
    found = []
    for group in cgroups.groups(root, "cpu"):
        words = (kernel_files.text(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdecimal():
            found.append(int(words[0]) / int(words[1]))
        quota, period = (kernel_files.number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)
