"""Prints, as JSON, the nanoseconds of each primitive: tight loops, and paced with cold caches."""

from __future__ import annotations

import json
import os
import sys
import time
import timeit

from resilience_sdk import heartbeat, preemption, straggler


class Empty:
    """The cheapest context manager that Python code can have."""

    __slots__ = ()

    def __enter__(self) -> Empty:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


empty = Empty()
section = straggler.section

TIGHT = {
    "empty": "with empty: pass",
    "heartbeat": "with heartbeat(): pass",
    "section": "with section('fwd'): pass",
    "beat": "beat()",
    "check": "check()",
    "work": "work(4096)",
}


def paced(statement: str, count: int) -> list[float]:
    """Time a statement once per millisecond of sleep, less what the clock itself costs."""
    code = compile(statement, "<paced>", "exec")
    names = dict(globals())
    samples = []
    for _ in range(count):
        time.sleep(0.001)
        start = time.perf_counter_ns()
        exec(code, names)
        samples.append(float(time.perf_counter_ns() - start))
    return samples


def main(repeats: int, loops: int) -> None:
    """Measure everything and print it."""
    # One core: a migration in the middle of a loop would be measured too.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = {
        "empty": empty,
        "heartbeat": heartbeat,
        "section": section,
        "beat": heartbeat.beat,
        "check": preemption.check,
        "work": straggler.work,
    }
    for statement in TIGHT.values():  # the first use starts the recording
        timeit.timeit(statement, globals=names, number=100)
    time.sleep(0.5)
    result: dict[str, list[float]] = {name: [] for name in TIGHT}
    for _ in range(repeats):  # in turns, so that what else the machine does falls on all alike
        for name, statement in TIGHT.items():
            # CPU time: nothing here waits, and time that other processes had is no cost of ours.
            seconds = timeit.timeit(statement, globals=names, number=loops, timer=time.thread_time)
            result[name].append(seconds / loops * 1e9)
    nothing = sorted(paced("pass", 300))[150]
    for name in ("empty", "heartbeat", "section"):
        result[f"{name} paced"] = [value - nothing for value in paced(TIGHT[name], 100 * repeats)]
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
