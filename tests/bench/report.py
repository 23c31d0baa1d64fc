"""The report of a run directory, read and drawn: seconds, peak memory and size of the page, by the size of the run.

Journals are those of 100,000 steps of 0.2 s in two attempts, the second of which makes the last twentieth, written by
the journal itself at the pace of the monitors: one of each node's launcher and monitor, one of each rank. Each
measurement is a process of its own, so that its peak is that of reading alone.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import attrs

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore
from resilience_sdk.incidents.record import event_fields
from resilience_sdk.monitor.stragglers import progress_pause_s
from tests.bench.figures import Context, Figure

MOST_S = 8.0
MOST_MB = 400.0
_STEPS = 100_000
_STEP_S = 0.2
_FIRST_ATTEMPT = 0.95  # of the steps
_RANKS_PER_NODE = 8
_SIZES = (1, 64, 4096)


@attrs.frozen
class ReportRun:
    """A run directory of so many ranks, of which the last one is slow from the middle on."""

    path: Path
    ranks: int
    steps: int = _STEPS

    def write(self) -> int:
        """Write its journals; return how many events there are."""
        RunDirectory.create(self.path)
        per_node = min(self.ranks, _RANKS_PER_NODE)
        nodes = self.ranks // per_node
        began, events = 1_700_000_000.0, 0
        now = [began]
        steady = mock.patch.object(time, "monotonic_ns", side_effect=lambda: int(now[0] * 1e9))
        with steady, mock.patch.object(time, "time", side_effect=lambda: now[0]):
            for node in range(nodes):
                events += self._node(node, nodes, per_node, began, now)
        return events

    def _journal(self, writer: str, node: int, rank: int | None = None) -> Journal:
        host = f"node{node:04}"
        return Journal(
            self.path / "journal", writer=writer, host=host, boot_id=f"boot-{host}", job="job", rank=rank
        )  # fmt: skip

    def _node(self, node: int, nodes: int, per_node: int, began: float, now: list[float]) -> int:
        ranks = list(range(node * per_node, (node + 1) * per_node))
        launcher, monitor = self._journal("launcher", node), self._journal("monitor", node)
        of_ranks = [self._journal(f"rank{rank}", node, rank) for rank in ranks]
        draw, events = random.Random(node), 0
        half = int(_FIRST_ATTEMPT * self.steps)
        for attempt in (0, 1):
            start = began + attempt * (half * _STEP_S + 60.0)
            for one in (launcher, monitor, *of_ranks):
                one.attempt = attempt
            now[0] = start
            if attempt == 0:
                launcher.emit(Event.RUN_START, argv=["train.py"], versions={}, settings={}, unheld_s=None)
            launcher.emit(
                Event.ATTEMPT_START, ranks=ranks, world_size=self.ranks, node=node, nodes=nodes,
                node_name=f"node{node:04}", rendezvous_s=3.0,
            )  # fmt: skip
            now[0] = start + 20.0
            for one, rank in zip(of_ranks, ranks, strict=True):
                one.emit(Event.RANK_START, pid=1000 + rank, local_rank=rank % per_node, world_size=self.ranks)
                if attempt and rank == 0:
                    one.emit(Event.RESUME, step=half, seconds=4.0, checkpoint="step")
                monitor.emit(Event.FIRST_BEAT, step=attempt * half, rank=rank)
            events += (
                4 + 2 * per_node + self._train(attempt, node, ranks, monitor, of_ranks[0], start + 20.0, now, draw)
            )
            for rank in ranks:
                launcher.emit(
                    Event.RANK_EXIT, step=self.steps if attempt else half, rank=rank, exit_code=attempt ^ 1,
                    signal=None, step_is_global=True, ended_by_launcher=not attempt and rank != 3,
                )  # fmt: skip
            if node == 0 and not attempt:
                self._fail(launcher, now[0])
            launcher.emit(Event.ATTEMPT_END, ended_by="ranks")
            events += per_node + 1
        if node == 0:
            launcher.emit(Event.DECISION, verdict="finished", exit_code=0, reason="all ranks exited with 0")
            launcher.emit(Event.FINISHED, attempts=2)
        for one in (launcher, monitor, *of_ranks):
            one.close()
        return events

    def _train(
        self, attempt: int, node: int, ranks: list[int], monitor: Journal, first: Journal, start: float,
        now: list[float], draw: random.Random,
    ) -> int:  # fmt: skip
        half = int(_FIRST_ATTEMPT * self.steps)
        events, at, step = 0, start, attempt * half
        end = start + (self.steps - half if attempt else half) * _STEP_S
        next_loss = next_save = start
        next_sums, pause_s = start + 10.0, 10.0
        while at < end:
            wall_s = min(progress_pause_s(at - start), end - at)
            at, steps = at + wall_s, max(1, int(wall_s / _STEP_S))
            step, now[0], events = step + steps, at, events + 1
            slow = 1.3 if at > start + 0.5 * (end - start) else 1.0
            own = [
                round(300 * draw.uniform(0.97, 1.03) * (slow if rank == self.ranks - 1 else 1.0), 1) for rank in ranks
            ]
            monitor.emit(
                Event.PROGRESS, step=step, step_is_global=True, steps=steps, wall_s=round(wall_s, 3),
                mean_ms=1000 * _STEP_S, longest_ms=draw.uniform(500, 900), ranks=ranks, own_ms=own,
            )  # fmt: skip
            if at >= next_sums:
                pause_s = min(300.0, 1.5 * pause_s)
                next_sums, events = at + pause_s, events + 1
                sections = [
                    {"name": name, "kind": kind, "share": 0.3, "least": 0.29, "most": 0.31, "rank": ranks[0]}
                    for name, kind in (("data", "io"), ("fwd", "compute"), ("bwd", "compute"), ("comm", "comm"))
                ]
                monitor.emit(
                    Event.STEP_TIME, steps=step, wall_s=at - start, ranks=ranks, data_s=1.0, saves_s=1.0,
                    work_per_s=None, fixed_share=None, sections=sections,
                )  # fmt: skip
            if node == 0 and at >= next_loss:
                next_loss = at + max(1.0, (at - start) / 500)
                first.emit(Event.LOSS, step=step, is_global=True, loss=8.0 / (1 + step / 1000), grad_norm=1.0)
            if node == 0 and at >= next_save:
                next_save = at + 600.0
                first.emit(Event.CKPT_BEGIN, step=step)
                first.emit(Event.CKPT_COMMIT, step=step, bytes=1 << 30, seconds=20.0, stall_s=2.0, checkpoint="x")
        return events

    def _fail(self, launcher: Journal, at: float) -> None:
        incident = Incident(
            kind="crash", attempt=0, detected_at=at, detection_latency_s=0.1,
            culprits=(Culprit(3, "node0000", self.steps // 2, "bwd", ("/home/u/train.py:3 step",)),),
            victims=tuple(rank for rank in range(min(self.ranks, 4096)) if rank != 3), cause="gpu_lost",
            category="hardware", confidence=0.9, evidence=(Evidence("log", "CUDA error: device lost"),),
        )  # fmt: skip
        launcher.emit(Event.INCIDENT, **event_fields(IncidentStore(self.path).create("crash", incident)))


_PROGRAM = """
import json, resource, sys, time
from resilience_sdk.core.run_directory import RunDirectory
began = time.perf_counter()
from resilience_sdk.report.read import read_run
facts = read_run(RunDirectory.open(sys.argv[1]))
told = {"read_s": time.perf_counter() - began, "rows": len(facts.heat.rows) if facts.heat else 0,
        "points": sum(len(curve.at) for curve in facts.step_time), "problems": list(facts.problems)}
if sys.argv[2] == "draw":
    from resilience_sdk.report import page
    began = time.perf_counter()
    text = (getattr(page, "render", None) or page.page)(facts)
    text = text if isinstance(text, str) else "\\n".join(text)
    told |= {"draw_s": time.perf_counter() - began, "html_bytes": len(text.encode())}
told["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps(told))
"""


def measure(context: Context) -> list[Figure]:
    """Write runs of 1, 64 and 4,096 ranks and read each in a process of its own."""
    figures = []
    draws = "draw" if importlib.util.find_spec("resilience_sdk.report.page") else "read"
    for ranks in _SIZES[:2] if context.quick else _SIZES:
        run = ReportRun(context.scratch / f"ranks-{ranks}", ranks)
        events = run.write()
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(run.path), draws], capture_output=True, text=True, check=True
        )  # fmt: skip
        told = json.loads(done.stdout)
        if told["problems"]:
            raise AssertionError(f"of {ranks} ranks: {told['problems']}")
        name, size = f"report of {ranks:,} ranks", f"{events:,} events, {_STEPS:,} steps"
        figures += [
            Figure(f"{name}: reading", "ours", "s", (told["read_s"],), target=MOST_S, note=size),
            Figure(f"{name}: peak memory", "ours", "MB", (told["peak_bytes"] / 1e6,), target=MOST_MB),
        ]
        if "draw_s" in told:
            figures += [
                Figure(f"{name}: drawing", "ours", "s", (told["draw_s"],)),
                Figure(f"{name}: size of the page", "ours", "MB", (told["html_bytes"] / 1e6,)),
            ]
    return figures
