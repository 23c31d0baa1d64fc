"""All interleavings of the jobs that are too large for the suite: no stop deadlocks, and no ranks stop apart."""

from __future__ import annotations

import time

from tests.bench.figures import Context, Figure
from tests.unit.preemption.exploration import Job, explore

JOBS = (Job((3,), checks=2), Job((2,), checks=3, rounds=2), Job((2,), checks=3, rounds=2, monitors_die=True))


def measure(context: Context) -> list[Figure]:
    """Explore each job; raises AssertionError where a state has no good end."""
    figures = []
    for job in JOBS[: context.repeats(len(JOBS), 1)]:
        began_s = time.monotonic()
        found = explore(job)
        assert not found.stuck, f"{job}: {len(found.stuck)} states without a good end, as {found.stuck[0]}"
        assert not found.split, f"{job}: {len(found.split)} states in which ranks stop apart, as {found.split[0]}"
        assert found.stopped, f"{job}: no end in which all have stopped"
        ranks = "+".join(map(str, job.nodes))
        note = f"{ranks} ranks, {job.checks} checks, {job.rounds} rounds{', monitors die' * job.monitors_die}"
        seconds = time.monotonic() - began_s
        figures.append(Figure("stop: states explored", "ours", "states", (float(found.states),), note=note))
        figures.append(Figure("stop: to explore them", "ours", "s", (seconds,), note=note))
    return figures
