"""A DDP training that is slow in legitimate ways: `slow_work.py [--beats block|pulse] [--slow S] PHASE...`

Before each phase there are steps as usual, under names of its own, so that deadlines are learned anew. A phase
that ends in `-0` happens on rank 0 alone, while the others wait for it in backward. `first` is about the first
step, `upload...` comes after the last.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("phases", nargs="+")
parser.add_argument("--slow", type=float, default=2.5)
parser.add_argument("--beats", choices=["block", "pulse"], default="block")
parser.add_argument("--steps", type=int, default=25, help="before each phase")
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


TRACER = """
import ctypes, os, sys, time
seize, interrupt, detach, any_child = 0x4206, 0x4207, 17, 0x40000000
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
print("ready", flush=True)
pid, seconds = int(sys.stdin.readline()), float(sys.argv[1])
if ptrace(seize, pid, None, None):
    sys.exit(3)
ptrace(interrupt, pid, None, None)
os.waitpid(pid, any_child)
time.sleep(seconds)
ptrace(detach, pid, None, None)
"""


def start_tracer() -> subprocess.Popen:
    """Return a debugger that waits to be told whom to stop."""
    pr_set_ptracer = 0x59616D61
    ctypes.CDLL(None).prctl(pr_set_ptracer, ctypes.c_ulong(-1))  # where only parents may trace
    tracer = subprocess.Popen(
        [sys.executable, "-S", "-c", TRACER, str(args.slow)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    tracer.stdout.readline()
    return tracer


def be_traced() -> None:
    """Stand still under a debugger."""
    tracer.communicate(f"{os.getpid()}\n")
    print("traced" if tracer.returncode == 0 else "cannot trace")


PHASES = {
    "first": lambda: work(args.slow),
    "eval": evaluate,
    "compile": compile_again,
    "save": save,
    "breakpoint": lambda: breakpoint(),
    "traced": be_traced,
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
        print(f"begin {phase} {rank}")
        PHASES[phase.removesuffix("-0")]()
        print(f"end {phase} {rank}")
    with straggler.section(f"bwd-{number}"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def run_step(number: int, phase: str = "") -> None:
    """One step with its beat."""
    if args.beats == "pulse":
        train_step(number, phase)
        heartbeat.beat()
    else:
        with heartbeat(f"step-{number}"):
            train_step(number, phase)


for number, phase in enumerate(args.phases):
    tracer = start_tracer() if phase == "traced-0" and rank == 0 else None
    if phase == "first":
        run_step(number, phase)
    for _ in range(args.steps):
        run_step(number)
    if phase == "eval-0":  # between two steps, as evaluations are
        if rank == 0:
            print(f"begin {phase} {rank}")
            evaluate()
            print(f"end {phase} {rank}")
    elif phase.startswith("upload"):
        if phase == "upload-done":
            heartbeat.done()
        if rank == 0 or phase != "upload-0":
            print(f"begin {phase} {rank}")
            work(args.slow)
            print(f"end {phase} {rank}")
    elif phase != "first":
        run_step(number, phase)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} finished")
