"""Nodes of simulated ranks, whose durations are collected and judged together."""

from __future__ import annotations

import random
import struct

from resilience_sdk.recorder.page_layout import WORK
from resilience_sdk.straggler.detector import Aggregate
from resilience_sdk.straggler.window_messages import Collector, NodePieces, decode

STEP_S = 0.25


class Cluster:
    """Nodes of ranks in lockstep. `slow(rank, section, step)` gives seconds more; `looks` are every `every` steps."""

    def __init__(self, nodes=1, ranks=4, sections=None, slow=lambda rank, section, step: 0.0, every=2, seed=0):
        usual = {"fwd": ("compute", 1), "bwd": ("compute", 1), "comm_wait": ("comm", 1)}
        self.sections = usual if sections is None else sections
        self.collectors = [Collector(nodes) for _ in range(nodes)]
        self.aggregate = Aggregate(nodes)
        self.ranks = {node: list(range(node * ranks, (node + 1) * ranks)) for node in range(nodes)}
        self.process = {rank: (rank, 0) for ranks in self.ranks.values() for rank in ranks}
        self.counts = {}
        self.changes = []
        self.step, self.every, self.slow = 0, every, slow
        self.first_step = 0
        self.random = random.Random(seed)
        self.mute = set()
        self.joint = set()
        self.roles = {}
        self.lengths = None
        self.has_beats = True

    def restart(self, rank):
        """Replace a rank's process: it counts from nothing."""
        self.process[rank] = (rank, self.step)
        self.counts = {key: count for key, count in self.counts.items() if key[0] != rank}

    def run(self, steps):
        """Train for so many steps, and return what has changed."""
        before = len(self.changes)
        for _ in range(steps // self.every):
            self.look()
        return self.changes[before:]

    def look(self):
        steps = range(self.step, self.step + self.every)
        self.step += self.every
        now = self.step * STEP_S
        for node, collector in enumerate(self.collectors):
            collector.present({rank: self.process[rank] for rank in self.ranks[node]})
            for rank in self.ranks[node]:
                self.pass_steps(collector, rank, steps)
            pieces = collector.take(self.first_step, now)
            roles = {rank: self.roles.get(rank, "") for rank in self.ranks[node]}
            told = decode(NodePieces(0, node, f"n{node}", self.step, tuple(pieces), roles).to_text())
            assert told is not None
            self.aggregate.add(told)
        self.changes += self.aggregate.judge()

    def pass_steps(self, collector, rank, steps):
        if rank in self.mute:
            return
        lengths = [1.0 if self.lengths is None else self.lengths(rank, step) for step in steps]
        if self.lengths is not None:
            words = struct.unpack(f"{len(lengths)}Q", struct.pack(f"{len(lengths)}d", *lengths))
            collector.add(rank, "calls", WORK, 0, steps[0], words)
        beats = {"step": ("heartbeat", 1)} if self.has_beats else {}
        for section, (kind, often) in {**self.sections, **beats}.items():
            durations = []
            for step, length in zip(steps, lengths, strict=True):
                if often < 1 and step % round(1 / often):
                    continue
                base = STEP_S if section == "step" else 0.010 * length
                durations += [
                    int(1e9 * (base * self.random.lognormvariate(0.0, 0.01) + self.slow(rank, section, step)))
                    for _ in range(max(1, round(often)))
                ]
            start = self.counts.get((rank, section), 0)
            self.counts[rank, section] = start + len(durations)
            if durations:
                collector.add(rank, section, kind, 0, start, durations, is_joint=section in self.joint)


def slow_rank(rank, section="bwd", since=0, until=10**9, seconds=0.05):
    return lambda r, s, step: seconds if (r, s) == (rank, section) and since <= step < until else 0.0
