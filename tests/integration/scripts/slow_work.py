"""A DDP training that is slow in legitimate ways: `slow_work.py [--slow S] PHASE...`

Before each phase there are steps as usual, under names of its own, so that deadlines are learned anew. A phase
that ends in `-0` happens on rank 0 alone, while the others wait for it in backward. `first` is about the first
step, `upload-done` comes after the last.
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
parser.add_argument("--steps", type=int, default=12, help="before each phase")
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


PHASES = {
    "first": lambda: work(args.slow),
    "eval": evaluate,
    "compile": compile_again,
    "save": save,
}

torch.set_num_threads(1)
torch.compile(lambda x: x, backend="eager")(torch.ones(1))  # loads the compiler
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(number: int, phase: str) -> None:
    """One step, with the work of a phase before its backward."""
    with straggler.section(f"fwd-{number}"):
        loss = model(torch.ones(4, 8)).sum()
    time.sleep(0.01)
    if phase and (rank == 0 or not phase.endswith("-0")):
        PHASES[phase.removesuffix("-0")]()
    with straggler.section(f"bwd-{number}"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run_step(number: int, phase: str = "") -> None:
    """One step with its beat."""
    with heartbeat(f"step-{number}"):
        train_step(number, phase)


for number, phase in enumerate(args.phases):
    if phase == "first":
        run_step(number, phase)
    for _ in range(args.steps):
        run_step(number)
    if phase == "eval-0":  # between two steps, as evaluations are
        if rank == 0:
            PHASES["eval"]()
        run_step(number)
    elif phase == "upload-done":
        heartbeat.done()
        work(args.slow)
    elif phase != "first":
        run_step(number, phase)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} finished")
