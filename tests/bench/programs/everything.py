"""A rank whose steps of 10 ms run with the whole SDK and without it in turns: `everything.py OUT PAIRS STEPS SEED`.

In the blocks without it the step calls nothing of the SDK, and the launcher with all that it keeps beside the rank is
stopped (SIGSTOP): what they put off falls into the blocks with it. The monitor alone goes on: another process would be
started for one that seems to be frozen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from resilience_sdk import heartbeat, preemption, straggler

_COMPUTING_S, _WAITING_S = 0.008, 0.002  # of a step: real-time priority is not taken away below 95 % of a core
_SETTLE_S = 15.0  # the watch over the node's health starts 10 s after the job
_TIGHT = 200  # steps of each sample
_DATA = bytes(16384)
_PRIORITY = 20


def main(out: Path, pairs: int, steps: int, seed: int) -> None:
    """Measure and write what was found to `out` as JSON."""
    step = _step_of_10_ms()
    on, off = step_with_all(step), step_without(step)
    empty, locked = step_with_blocks(step, Empty()), step_with_blocks(step, threading.RLock())
    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end:
        on()
    helpers = _Helpers()
    real_time = _real_time()
    result: dict[str, Any] = {"real_time": real_time, "pairs": [], "tight_cpu": _tight()}
    before, began = helpers.costs(), time.monotonic()
    chance = random.Random(seed)
    for _ in range(pairs):
        pair: dict[str, float] = {}
        for kind in chance.sample(("on", "off"), 2):
            with contextlib.nullcontext() if kind == "on" else helpers.stopped():
                threads = _threads_ns()
                took = [on() if kind == "on" else off() for _ in range(steps)]
                threads = _threads_ns() - threads
            pair |= {
                kind: statistics.median(wall for wall, _ in took),
                f"{kind}_mean": sum(wall for wall, _ in took) / steps,
                f"{kind}_cpu": sum(cpu for _, cpu in took) / steps,
                f"{kind}_threads": threads / steps,
            }
        with helpers.stopped():
            for name, control in (("empty_cpu", empty), ("locked_cpu", locked)):
                pair[name] = sum(cpu for _, cpu in [control() for _ in range(steps // 5)]) / (steps // 5)
        result["pairs"].append(pair)
    result["seconds"] = time.monotonic() - began
    after = helpers.costs()
    result["helpers"] = {name: after[name] - before[name] for name in after}
    heartbeat.done()
    out.write_text(json.dumps(result))


def step_with_all(step: Callable[[], None]) -> Callable[[], tuple[int, int]]:
    """Return a step with everything that a script can ask for: it tells its wall and our processor time, in ns."""
    section, wall, cpu = straggler.section, time.perf_counter_ns, time.thread_time_ns

    def run() -> tuple[int, int]:
        began = wall()
        first = cpu()
        with heartbeat():
            with section("data"):
                pass
            with section("forward"):
                entered = cpu()
                step()
                left = cpu()
            with section("backward"):
                pass
            with section("optimizer"):
                pass
        preemption.check()
        last = cpu()
        return wall() - began, entered - first + last - left

    return run


def step_without(step: Callable[[], None]) -> Callable[[], tuple[int, int]]:
    """Return the same without the SDK: what it tells as ours is what reading the clock costs there."""
    wall, cpu = time.perf_counter_ns, time.thread_time_ns

    def run() -> tuple[int, int]:
        began = wall()
        first = cpu()
        entered = cpu()
        step()
        left = cpu()
        last = cpu()
        return wall() - began, entered - first + last - left

    return run


def _tight() -> list[float]:
    """Return what the SDK takes, in ns, of each of some steps that do nothing, so that all it needs stays cached."""
    on, off = step_with_all(lambda: None), step_without(lambda: None)
    without = statistics.median(off()[1] for _ in range(_TIGHT))
    return [statistics.median(on()[1] for _ in range(_TIGHT)) - without for _ in range(10)]


def step_with_blocks(step: Callable[[], None], nothing: Any) -> Callable[[], tuple[int, int]]:
    """Return a step with as many `with` and calls as that with the SDK, of what does next to nothing.

    That is Python's own part: of a class in Python, and of a lock, which is in C.
    """
    wall, cpu = time.perf_counter_ns, time.thread_time_ns

    def run() -> tuple[int, int]:
        began = wall()
        first = cpu()
        with nothing:
            with nothing:
                pass
            with nothing:
                entered = cpu()
                step()
                left = cpu()
            with nothing:
                pass
            with nothing:
                pass
        nothing.__sizeof__()
        last = cpu()
        return wall() - began, entered - first + last - left

    return run


class Empty:
    """A block that does nothing, in Python."""

    __slots__ = ()

    def __enter__(self) -> Empty:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __sizeof__(self) -> int:
        return 0


def _step_of_10_ms() -> Callable[[], None]:
    """Return work of always the same amount, and a wait as if for a device."""

    def compute(count: int) -> None:
        for _ in range(count):
            hashlib.sha256(_DATA).digest()

    def seconds_of(count: int) -> float:
        began = time.thread_time()
        compute(count)
        return time.thread_time() - began

    count = round(200 * _COMPUTING_S / sorted(seconds_of(200) for _ in range(15))[7])

    def step() -> None:
        compute(count)
        time.sleep(_WAITING_S)

    return step


def _real_time() -> bool:
    """Take a core for this thread alone, where that is allowed; those it starts do not inherit the priority."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
        return True
    return False


class _Helpers:
    """The launcher, its fork server, and those that serve this rank."""

    def __init__(self) -> None:
        fork_server = os.getppid()
        launcher = int(_stat(fork_server)[1])
        self.pids = {"launcher": launcher, "fork server": fork_server}
        for state in Path(os.environ["RESILIENCE_PAGE_DIR"]).glob("**/monitor.json"):
            self.pids["monitor"] = json.loads(state.read_text())["pid"]
        for child in Path(f"/proc/{launcher}/task").glob("*/children"):
            for pid in map(int, child.read_text().split()):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"health.watch" in command:
                    self.pids["watch"] = pid
                elif b"--from-launcher" in command:
                    self.pids["exporter"] = pid
        if missing := {"monitor", "watch", "exporter"} - self.pids.keys():
            raise RuntimeError(f"not everything is on: no {missing}")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all but the monitor."""
        pids = [pid for name, pid in self.pids.items() if name != "monitor"]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def costs(self) -> dict[str, float]:
        """Return the processor seconds of each so far, with those of the children that it has waited for."""
        tick = os.sysconf("SC_CLK_TCK")
        costs = {}
        for name, pid in self.pids.items():
            with contextlib.suppress(OSError):  # it may have ended, and another one runs instead
                children = 0.0 if name in ("launcher", "fork server") else sum(map(int, _stat(pid)[13:15])) / tick
                costs[name] = _own_cost(pid) + children
        return costs


def _own_cost(pid: int) -> float:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _threads_ns() -> int:
    """Return the processor time of this process's threads other than the main one."""
    main_thread, total = str(os.getpid()), 0
    for task in os.listdir("/proc/self/task"):
        if task != main_thread:
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0])
    return total


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
