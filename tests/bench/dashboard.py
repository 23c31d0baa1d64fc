"""A dashboard of 200 runs: how soon it answers, cold and warm, and what it takes of a core, looked at or not."""

from __future__ import annotations

import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.lease import RENEW_INTERVAL_S
from tests.bench import processes
from tests.bench.figures import Context, Figure

sys.path.insert(0, str(processes.ROOT / "tests"))
from dashboard_fleet import fleet

RUNS = 200
ANSWER_S, IDLE_PERCENT = 0.3, 1.0
_PATIENCE_S = 60.0
_WATCHED_S = 20.0
_WARM = 50
_UNREAD = "is-unread"


def measure(context: Context) -> list[Figure]:
    """Start it several times for the cold answers; the last one is measured further."""
    folder = context.scratch / "runs"
    folder.mkdir()
    paths = fleet(folder, RUNS)
    lines = sum(path.read_bytes().count(b"\n") for path in folder.glob("*/journal/*"))
    cold, whole = [], []
    for number in range(context.repeats(10, 2)):
        with _dashboard(folder, context.scratch / f"log-{number}") as (url, _):
            cold.append(_took(url))
            began_s = time.monotonic()
            while _UNREAD in _get(url):
                pass
            whole.append(cold[-1] + time.monotonic() - began_s)
    watched_s = _WATCHED_S if not context.quick else 5.0
    for lease in folder.glob("*/lease.json"):
        lease.touch()
    with _going_on(folder), _dashboard(folder, context.scratch / "log") as (url, process):
        _get(url)
        warm = [_took(url) for _ in range(_WARM)]
        runs = re.findall(r'href="(/run/[^"]*)"', _get(url))
        reports = [_took(url.rstrip("/") + run) for run in runs[:20]]
        idle = [_share(process, watched_s) for _ in range(context.repeats(3, 1))]
        with _viewer(url):
            looked_at = [_share(process, watched_s) for _ in range(context.repeats(3, 1))]
        with _viewer(url.rstrip("/") + runs[0]):
            report_looked_at = [_share(process, watched_s) for _ in range(context.repeats(3, 1))]
        memory = process.memory_info().rss / 1e6
    told = f"{len(paths)} runs, {lines} lines"
    return [
        Figure("dashboard: first answer", "ours", "s", tuple(cold), ANSWER_S, ANSWER_S, told),
        Figure("dashboard: until every run is read", "ours", "s", tuple(whole), note="by asking again and again"),
        Figure("dashboard: answer", "ours", "s", tuple(warm), ANSWER_S, ANSWER_S),
        Figure("dashboard: a run's report", "ours", "s", tuple(reports), note="read for the first time"),
        Figure("dashboard: nobody looks", "ours", "% of a core", tuple(idle), IDLE_PERCENT, IDLE_PERCENT),
        Figure("dashboard: one looks at the list", "ours", "% of a core", tuple(looked_at), note="12 runs go on"),
        Figure(
            "dashboard: one looks at a report",
            "ours",
            "% of a core",
            tuple(report_looked_at),
            note="of a run that goes on",
        ),
        Figure("dashboard: memory", "ours", "MB", (memory,)),
    ]


@contextmanager
def _going_on(folder: Path) -> Iterator[None]:
    """Renew the leases of the runs that go on, as their launchers would."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_INTERVAL_S):
            for lease in folder.glob("*/lease.json"):
                write_whole(lease, lease.read_text())

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()


@contextmanager
def _dashboard(folder: Path, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "resilience_sdk", "dashboard", str(folder), "--port", "0", "--no-token"]
    with processes.started(command, processes.environment(), log) as process:
        until_s = time.monotonic() + _PATIENCE_S
        while (found := re.search(r"http://\S+/", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, "it did not begin"
            time.sleep(0.01)
        yield found[0], psutil.Process(process.pid)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text


def _took(url: str) -> float:
    began_s = time.monotonic()
    _get(url)
    return time.monotonic() - began_s


@contextmanager
def _viewer(url: str) -> Iterator[None]:
    """Have a page open, which takes what it is told."""
    stream = urllib.request.urlopen(f"{url.rstrip('/')}/events", timeout=_PATIENCE_S)
    while not stream.readline().startswith(b"data:"):
        pass
    reading = threading.Thread(target=lambda: [None for _ in stream], daemon=True)
    reading.start()
    try:
        yield
    finally:
        stream.fp.raw._sock.shutdown(2)
        reading.join(_PATIENCE_S)


def _share(process: psutil.Process, watched_s: float) -> float:
    """Return what a process takes of a core, in per cent."""
    before, began_s = process.cpu_times(), time.monotonic()
    time.sleep(watched_s)
    after = process.cpu_times()
    took_s = after.user + after.system - before.user - before.system
    return 100 * took_s / (time.monotonic() - began_s)
