"""A simulated year of a cluster, told by real journals: jobs of many sizes, failures, and the few nodes behind many.

Nodes differ in their rate of failures alone, which no journal tells. Jobs are placed at random and meet the failures
of all of their nodes; who is blamed is not always who it was.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from pathlib import Path

import attrs

from resilience_sdk.incidents import Evidence
from tests.told_fleet import ToldFleetRun

DAY_S = 86400.0
RATE = 6.5 / 1000
"""Failures in a node-day of the whole fleet, lemons included."""
LEMONS = 0.03
"""Share of the nodes that fail more often."""
TIMES = (8.0, 16.0, 32.0)
"""How many times as often, in turns."""
UNTOLD, MISTAKEN, SWITCHES = 0.05, 0.05, 0.03
"""Shares of the failures that name no node, another one of the job, and every one of it."""
USERS = 0.3
"""Share of the jobs that end with an error of their program."""
_SIZES = tuple(2**power for power in range(8))
_MEDIAN_DAYS, _SPREAD = 4.0, 1.0  # of a job's length, and of its logarithm
CAUSES = (
    ("gpu_fell_off_bus", "hardware"), ("gpu_uncorrectable_ecc", "hardware"), ("network_link_down", "network"),
    ("rank_killed_sigkill", "process"), ("storage_io_error", "storage"),
)  # fmt: skip
_ERRORS = ("KeyError: 'layer.{}'", "ValueError: shape ({}, 4)", "RuntimeError: size {} does not match", "OSError: {}")


@attrs.define
class _Job:
    run: ToldFleetRun
    ends_at: float


class ClusterYear:
    """The fleet and its jobs. `advance` lets time pass; everything is as the seed wants it."""

    def __init__(self, folder: Path, seed: int, nodes: int, began_s: float) -> None:
        """Make the nodes, in a folder that is there; nothing runs yet. `began_s`: Unix seconds."""
        self._draw = random.Random(seed)
        self.folder = folder
        self.at = began_s
        self.nodes = [f"n{number:04}" for number in range(nodes)]
        lemons = self._draw.sample(self.nodes, round(LEMONS * nodes))
        self.lemons = dict(zip(lemons, itertools.cycle(TIMES), strict=False))
        """How many times as often as the others each of them fails."""
        healthy = RATE * nodes / (nodes - len(lemons) + sum(self.lemons.values()))
        self._rates = {node: healthy * self.lemons.get(node, 1.0) / DAY_S for node in self.nodes}
        self.failures = self.of_lemons = self.jobs = 0
        self._free = set(self.nodes)
        self._sizes = [size for size in _SIZES if 4 * size <= nodes]
        self._weights = [size**-0.7 for size in self._sizes]  # so that large ones have most of the nodes' time
        self._next_size = self._sizes[-1]
        self._agenda: list[tuple[float, int, _Job]] = []
        self._tick = itertools.count()
        self._told: dict[Path, None] = {}

    def advance(self, days: float) -> list[Path]:
        """Let days pass; return the run directories in which something was told."""
        until = self.at + days * DAY_S
        self._fill()
        while self._agenda and self._agenda[0][0] <= until:
            self.at, _, job = heapq.heappop(self._agenda)
            job.run.at = self.at
            self._told[job.run.path] = None
            if self.at >= job.ends_at:
                self._end(job)
            else:
                self._fail(job)
                self._plan(job)
        self.at = until
        told, self._told = list(self._told), {}
        return told

    def close(self) -> None:
        """Let go of the journals of what still runs."""
        for _, _, job in self._agenda:
            job.run.close()

    def _fill(self) -> None:
        """Start the jobs that wait, in their order: a large one lets nodes idle until it fits."""
        while self._next_size <= len(self._free):
            size = self._next_size
            (self._next_size,) = self._draw.choices(self._sizes, self._weights)
            nodes = sorted(self._draw.sample(sorted(self._free), size))
            self._free -= set(nodes)
            self.jobs += 1
            run = ToldFleetRun.make(
                self.folder / f"run{self.jobs:05}", nodes, at=self.at, script=f"train{self._draw.randrange(40)}.py"
            )
            days = self._draw.lognormvariate(math.log(_MEDIAN_DAYS), _SPREAD)
            run.start(python="3.11.7", versions={"torch": f"2.{self._draw.randrange(4)}.0"})
            self._told[run.path] = None
            self._plan(_Job(run, self.at + days * DAY_S))

    def _plan(self, job: _Job) -> None:
        rate = sum(self._rates[node] for node in job.run.nodes)
        at = min(job.ends_at, self.at + self._draw.expovariate(rate))
        heapq.heappush(self._agenda, (at, next(self._tick), job))

    def _fail(self, job: _Job) -> None:
        self.failures += 1
        nodes = list(job.run.nodes)
        (culprit,) = self._draw.choices(nodes, [self._rates[node] for node in nodes])
        self.of_lemons += culprit in self.lemons
        cause, category = self._draw.choice(CAUSES)
        luck = self._draw.random()
        if luck < UNTOLD:
            job.run.fail((), cause, category)
        elif luck < UNTOLD + MISTAKEN:
            job.run.fail(self._draw.choice(nodes), cause, category)
        elif luck < UNTOLD + MISTAKEN + SWITCHES:
            job.run.fail(nodes, "network_unreachable", "network")
        else:
            job.run.fail(culprit, cause, category)

    def _end(self, job: _Job) -> None:
        if self._draw.random() < USERS:
            said = self._draw.choice(_ERRORS).format(self._draw.randrange(1000))
            node = self._draw.choice(list(job.run.nodes))
            job.run.fail(node, "user_code_error", "user", action="stop", evidence=[Evidence("exception", said)])
        job.run.end()
        self._free |= set(job.run.nodes)
        self._fill()
