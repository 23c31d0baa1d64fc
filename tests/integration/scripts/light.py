"""Two ranks that keep step through files, without torch: `light.py [--beats block|pulse] [--slow S] PHASE...`

Before each phase there are steps as usual, under names of its own. `upload`, `upload-0` (rank 0 alone, while the
other waits outside of any section), `upload-done` (after `heartbeat.done()`), `mute` (nothing at all). Within a
step: `breakpoint-0`, `traced-0`; and of the last rank: `hang` (until the file `go` is there), `raise`, `exit`,
`leave` (exit code 75), `kill`.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("phases", nargs="+")
parser.add_argument("--slow", type=float, default=2.0)
parser.add_argument("--beats", choices=["block", "pulse"], default="block")
parser.add_argument("--steps", type=int, default=25)
args = parser.parse_args()
VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
rank, size = next(((int(os.environ[r]), int(os.environ[s])) for r, s in VARIABLES if r in os.environ), (0, 1))
attempt = int(os.environ.get("RESILIENCE_INTERNAL_ATTEMPT", "0"))
told = Path(os.environ["TOLD"])
met = 0

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


def meet() -> None:
    """Wait for the other rank, as in a collective."""
    global met
    met += 1
    (told / f"met-{attempt}-{met}-{rank}").touch()
    while size > 1 and not (told / f"met-{attempt}-{met}-{1 - rank}").exists():
        time.sleep(0.002)


def hang_here() -> None:
    """Stop until somebody says go."""
    while not (told / "go").exists():
        time.sleep(0.02)


def start_tracer() -> subprocess.Popen:
    """Return a debugger that waits to be told whom to stop."""
    pr_set_ptracer = 0x59616D61
    ctypes.CDLL(None).prctl(pr_set_ptracer, ctypes.c_ulong(-1))  # where only parents may trace
    tracer = subprocess.Popen(
        [sys.executable, "-S", "-c", TRACER, str(args.slow)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    tracer.stdout.readline()
    return tracer


def work(phase: str) -> None:
    """Do what is slow."""
    print(f"begin {phase} {rank}")
    if phase == "breakpoint-0":
        breakpoint()
    elif phase == "hang":
        hang_here()
    elif phase == "raise":
        raise ValueError("the loss is not a number")
    elif phase == "exit":
        sys.exit(7)
    elif phase == "leave":
        sys.exit(75)
    elif phase == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif phase == "traced-0":
        tracer.communicate(f"{os.getpid()}\n")
        print("traced" if tracer.returncode == 0 else "cannot trace")
    else:
        time.sleep(args.slow)
    print(f"end {phase} {rank}")


def step(number: int, phase: str = "") -> None:
    """One step, with the work of a phase on the rank that it is for."""
    time.sleep(0.005)
    if phase and rank == (0 if phase.endswith("-0") else size - 1):
        work(phase)
    with straggler.section(f"reduce-{number}", kind="comm"):
        meet()


def beating_step(number: int, phase: str = "") -> None:
    """One step with its beat."""
    if args.beats == "pulse":
        step(number, phase)
        heartbeat.beat()
    else:
        with heartbeat(f"step-{number}"):
            step(number, phase)


for number, phase in enumerate(args.phases):
    if phase == "mute":
        time.sleep(args.slow)
        continue
    tracer = start_tracer() if phase == "traced-0" and rank == 0 else None
    for _ in range(args.steps):
        beating_step(number)
    if phase.startswith("upload"):
        if phase == "upload-done":
            heartbeat.done()
        if rank == 0 or phase != "upload-0":
            work(phase)
        meet()
    else:
        beating_step(number, phase)
print(f"rank {rank} finished")
