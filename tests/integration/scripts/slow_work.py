"""A DDP training that is slow in legitimate ways: `slow_work.py [--own beats] [--slow S] PHASE...`

Between two phases there are steps as usual, so that deadlines are learned. A phase that ends in `-0` happens on
rank 0 alone, while the others wait for it in backward. `first` is about the first step, `upload` after the last.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("phases", nargs="+")
parser.add_argument("--slow", type=float, default=2.5)
parser.add_argument("--beats", choices=["block", "pulse"], default="block")
parser.add_argument("--steps", type=int, default=25, help="as usual, before each phase")
args = parser.parse_args()
rank = int(os.environ["RANK"])


def work(seconds: float) -> None:
    """Take a while, in small pieces as computation does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def compiler(graph, inputs):
    """A backend of torch.compile that takes its time."""
    work(args.slow)
    return graph.forward


class SlowDisk:
    """A file that is written slowly."""

    def __init__(self) -> None:
        self.delay = args.slow

    def write(self, data) -> int:
        delay, self.delay = self.delay, 0
        time.sleep(delay)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept."""


def evaluate() -> None:
    with straggler.section("eval"):
        work(args.slow)


def compile_again() -> None:
    torch.compile(lambda x: x * 2 + 1, backend=compiler)(torch.ones(3))


def save() -> None:
    torch.save({"weights": torch.ones(1000)}, SlowDisk())


PHASES = {"first": lambda: work(args.slow), "eval": evaluate, "compile": compile_again, "save": save}

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(phase: str = "") -> None:
    """One step, with the work of a phase before its backward."""
    with straggler.section("fwd"):
        loss = model(torch.ones(4, 8)).sum()
    time.sleep(0.01)
    if phase and (rank == 0 or not phase.endswith("-0")):
        print(f"begin {phase} {rank}")
        PHASES[phase.removesuffix("-0")]()
        print(f"end {phase} {rank}")
    with straggler.section("bwd"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run_step(phase: str = "") -> None:
    """One step with its beat."""
    if args.beats == "pulse":
        train_step(phase)
        heartbeat.beat()
    else:
        with heartbeat():
            train_step(phase)


if args.phases[0] == "first":
    run_step("first")
for phase in [phase for phase in args.phases if phase in PHASES or phase.removesuffix("-0") in PHASES]:
    if phase != "first":
        for _ in range(args.steps):
            run_step()
        if phase == "eval-0":  # between two steps, as evaluations are
            if rank == 0:
                print(f"begin {phase} {rank}")
                evaluate()
                print(f"end {phase} {rank}")
        else:
            run_step(phase)
for _ in range(args.steps):
    run_step()
for phase in args.phases:
    if phase.startswith("upload"):
        if phase == "upload-done":
            heartbeat.done()
        if rank == 0 or phase != "upload-0":
            work(args.slow)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} finished")
