"""What the monitor of a node costs beside 8 ranks: share of a core, resident memory, number of processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bench import processes
from tests.bench.figures import Context, Figure

RANKS = 8
_SETTLE_S = 3.0
_START_S = 30.0


def measure(context: Context) -> list[Figure]:
    """Run 8 ranks and read the accounts of their monitor from /proc, second by second."""
    seconds = context.repeats(20, 5)
    with ExitStack() as stack:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        pages = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resilience-bench-", dir=shared)))
        env = processes.environment(
            RESILIENCE_PAGE_DIR=str(pages),
            RESILIENCE_RUN_DIR=str(context.scratch / "run"),
            WORLD_SIZE=str(RANKS),
        )
        command = [
            sys.executable,
            str(processes.PROGRAMS / "stepping.py"),
            str(seconds + 2 * _SETTLE_S + _START_S),
        ]
        log = context.scratch / "stepping.log"
        for rank in range(RANKS):
            identity = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            stack.enter_context(processes.started(command, env | identity, log))
        pid = _monitor(pages)
        time.sleep(_SETTLE_S)
        if pid is None:
            return [Figure("monitor, 8 ranks", "ours", "% of a core", (), 0.5, note="no monitor was found")]
        try:
            shares, memory = _watch(pid, seconds)
        except OSError as error:
            raise RuntimeError(f"the monitor ended while it was watched ({error}); see {log}") from error
    note = f"{RANKS} ranks, 47 steps/s, 4 sections"
    return [
        Figure("monitor cpu", "ours", "% of a core", shares, 0.5, note=note),
        Figure("monitor memory", "ours", "MB RSS", memory, 30.0, note="one process per node"),
    ]


def _monitor(pages: Path) -> int | None:
    """Return the pid of the monitor, which a loaded machine may take its time to start; None where none comes."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        for state in pages.glob("**/monitor.json"):
            return int(json.loads(state.read_text())["pid"])
        time.sleep(0.1)
    return None


def _watch(pid: int, seconds: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the CPU share (percent of a core) and the resident memory (MB) of each second."""
    shares, memory = [], []
    busy, now = _busy_ns(pid), time.monotonic_ns()
    for _ in range(seconds):
        time.sleep(1)
        before, then = busy, now
        busy, now = _busy_ns(pid), time.monotonic_ns()
        shares.append(100 * (busy - before) / (now - then))
        memory.append(_resident_mb(pid))
    return tuple(shares), tuple(memory)


def _busy_ns(pid: int) -> int:
    """Return the CPU time of all threads; the ticks of /proc/PID/stat are too coarse for a second."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads)


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")
