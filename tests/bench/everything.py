"""Everything on: what the whole SDK costs a step of 10 ms, in blocks with it and without it in turns.

On are heartbeat, four sections, the check for preemption, the collection of stragglers, monitor, health watch, and an
exporter that a Prometheus asks each second and that sends to an OpenTelemetry collector. Neighbouring blocks make a
pair, their order is left to chance. Of a block the median step counts, of the pairs the median difference, with its
95 % interval by bootstrap: on a machine that is not ours alone single steps, and blocks, take many times as long. What
comes once in many steps is in the processor time, of which the mean is told.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from tests.bench import processes
from tests.bench.figures import Context, Figure, shown
from tests.receiver import receiving

STEPS = 50  # of a block
_TARGET_US = 10.0
_TARGET_PERCENT = 0.5
_DRAWS = 4000
_SEED = 7
_LEAST_SCRAPES = 0.5  # of one each second: the exporter stands still half of the time


def measure(context: Context) -> list[Figure]:
    """Run one rank under the launcher; 8,000 steps with blocks of 50."""
    pairs = context.repeats(80, 10)
    out, pages = context.scratch / "found.json", context.scratch / "pages"
    pages.mkdir()
    port = _free_port()
    with receiving() as collector, _scraped(port) as scrapes:
        code = processes.run(
            [
                *processes.resilience_run(
                    f"--run-dir={context.scratch / 'run'}", "--nproc-per-node=1", "--max-restarts=0"
                ),
                *(f"--prometheus-address={port}", f"--otlp-endpoint={collector.url}"),
                *(str(processes.PROGRAMS / "everything.py"), str(out), str(pairs), str(STEPS), str(_SEED)),
            ],
            processes.environment(RESILIENCE_PAGE_DIR=str(pages)),
            context.scratch / "everything.log",
            120 + 4 * 2 * pairs * STEPS * 0.01,
        )
    if code != 0 or not out.exists():
        raise RuntimeError(f"exit code {code}; see {context.scratch / 'everything.log'}")
    found = json.loads(out.read_text())
    if len(scrapes) < _LEAST_SCRAPES * found["seconds"] or not collector.taken:
        raise RuntimeError(f"{len(scrapes)} scrapes, {len(collector.taken)} pushes: not everything was on")
    told = f"{len(scrapes)} scrapes, {len(collector.taken)} pushes"
    return [*_of_the_rank(found, pairs), *_of_the_helpers(found, told)]


def _of_the_rank(found: dict[str, Any], pairs: int) -> list[Figure]:
    threads = [pair["on_threads"] / 1000 for pair in found["pairs"]]
    cpu = [
        (pair["on_cpu"] - pair["off_cpu"]) / 1000 + us for pair, us in zip(found["pairs"], threads, strict=True)
    ]  # less what reading the clock costs
    empty, locked = (
        tuple((pair[name] - pair["off_cpu"]) / 1000 for pair in found["pairs"]) for name in ("empty_cpu", "locked_cpu")
    )
    tight = tuple(ns / 1000 for ns in found["tight_cpu"])
    slower = [100 * (pair["on"] / pair["off"] - 1) for pair in found["pairs"]]
    low, high = interval(slower, median)
    means = median(100 * (pair["on_mean"] / pair["off_mean"] - 1) for pair in found["pairs"])
    steps = f"{2 * pairs * STEPS} steps"
    priority = "the rank at real-time priority" if found["real_time"] else "the rank at plain priority"
    without = tuple(pair["off"] / 1e6 for pair in found["pairs"])
    return [
        Figure("everything on: a step without", "python", "ms", without, note=f"{steps}, {priority}"),
        Figure(
            "everything on: SDK CPU time of a step", "ours", "us", tuple(cpu), target=_TARGET_US,
            note=f"95 %: {_told(interval(cpu, median))}; mean {shown(fmean(cpu))}, {shown(fmean(threads))} in threads",
        ),
        Figure(
            "everything on: as many empty `with`", "python", "us", empty,
            note=f"95 %: {_told(interval(empty, median))}",
        ),
        Figure(
            "everything on: as many `with` of a lock in C", "python", "us", locked,
            note=f"95 %: {_told(interval(locked, median))}",
        ),
        Figure("everything on: the same steps without work, tight", "ours", "us", tight),
        Figure("everything on: slowdown, pairs of blocks", "ours", "%", tuple(slower)),
        Figure(
            "everything on: slowdown, upper end of 95 %", "ours", "%", (high,), _TARGET_PERCENT,
            note=f"median {shown(median(slower))}, 95 %: {_told((low, high))}; of the blocks' means {shown(means)}",
        ),
    ]  # fmt: skip


def _of_the_helpers(found: dict[str, Any], told: str) -> list[Figure]:
    notes = {"exporter": told, "monitor": f"of {found['seconds']:.0f} s; all others were stopped in half of them"}
    return [
        Figure(f"everything on: {name}", "ours", "% of a core", (share,), note=notes.get(name, ""))
        for name, seconds in found["helpers"].items()
        for share in [100 * seconds / found["seconds"]]
    ]


def interval(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Return the 95 % interval of the median or mean, by bootstrap with a fixed seed."""
    chance = random.Random(_SEED)
    drawn = sorted(of(chance.choices(values, k=len(values))) for _ in range(_DRAWS))
    return drawn[round(0.025 * _DRAWS)], drawn[round(0.975 * _DRAWS) - 1]


def _told(ends: tuple[float, float]) -> str:
    return f"{shown(ends[0])} .. {shown(ends[1])}"


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[list[int]]:
    """Ask for the metrics each second, as Prometheus does, until the end of the block; collects the sizes."""
    sizes: list[int] = []
    url, over = f"http://127.0.0.1:{port}/metrics", threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                sizes.append(len(answer.read()))

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
