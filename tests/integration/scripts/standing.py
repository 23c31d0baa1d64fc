"""A DDP training in which one rank does something for long: `standing.py --tier TIER [--attempts] WHAT@WHERE[:S] ...`

WHAT is a function of `DOINGS`, WHERE the name of a place (`start`, a step such as `20`, `eval3`, `save1`: the third
evaluation, the first save), S for how many seconds, for ever where it is not given. Steps and the start-up are those of
rank 1; rank 0 alone evaluates and saves, while the others wait for it in the next step. With `--attempts` each attempt
does one thing of the list and those after it none, else the first does all. Tiers: `plain` knows nothing of the SDK,
`by-hand` has no optimizer of torch besides,
`blocks` has heartbeats and sections (`blocks-unnamed` no sections for evaluations and saves), `adapter` is attached.
"""

import argparse
import contextlib
import ctypes
import hashlib
import math
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import standing_waits
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("todo", nargs="*", metavar="WHAT@WHERE[:S]")
parser.add_argument("--tier", choices=("plain", "by-hand", "blocks", "blocks-unnamed", "adapter"), default="plain")
parser.add_argument("--attempts", action="store_true", help="one of the list in each attempt")
parser.add_argument("--beside", action="store_true", help="a thread that wakes up and a child that chatters")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--longest", type=float, default=0.0, help="heavy-tailed steps, of at most so many seconds")
parser.add_argument("--pause", type=float, default=0.005, help="computing in each step, seconds")
args = parser.parse_args()
rank = int(os.environ["RANK"])
attempt = int(os.environ.get("RESILIENCE_INTERNAL_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
EVERY = {"eval": 5, "save": 10}
CALIBRATION = 200_000


def compute(seconds):
    """Compute in Python and torch."""
    end, weights = time.monotonic() + seconds, torch.ones(64, 64)
    while time.monotonic() < end:
        weights = torch.tanh(weights @ weights)


def write(seconds):
    """Write a file piece by piece, each to the disk."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.write(bytes(100_000))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(min(0.5, seconds / 20))


BUSY_CHILD = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


def child(seconds):
    """Wait for a subprocess that computes."""
    subprocess.run([sys.executable, "-S", "-c", BUSY_CHILD, str(seconds)], check=True)


def compiling(_):
    """Compile with a compiler of C++: some 20 s of a processor."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        torch.compile(lambda x: torch.sin(x).cumsum(0) + rank)(torch.ones(8))


class Slow(torch.utils.data.Dataset):
    """One item that takes its time."""

    def __init__(self, work):
        self.work = work

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.work()
        return index


def _load(work):
    next(iter(torch.utils.data.DataLoader(Slow(work), num_workers=1, multiprocessing_context="fork")))


def loader(seconds):
    """Wait for a DataLoader worker that computes."""
    _load(lambda: compute(seconds))


def released(seconds):
    """One long call in C that releases the GIL."""
    _hash(CALIBRATION)
    begin = time.thread_time()
    _hash(CALIBRATION)
    _hash(max(1, int(CALIBRATION * seconds / (time.thread_time() - begin))))


def _hash(rounds):
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", rounds)


def held(seconds):
    """One long call in C that holds the GIL."""
    begin = time.thread_time()
    sum(range(10 * CALIBRATION))
    sum(range(int(10 * CALIBRATION * seconds / (time.thread_time() - begin))))


def stop(_):
    """Stopped by a signal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(seconds):
    """Asleep."""
    time.sleep(min(seconds, 1e6))


def lock(seconds):
    """On a lock that somebody else keeps, for a time where one is given."""
    mutex = threading.Lock()
    mutex.acquire()
    mutex.acquire(timeout=-1 if math.isinf(seconds) else seconds)


def empty(seconds):
    """On a queue that nobody fills."""
    with contextlib.suppress(queue.Empty):
        queue.Queue().get(timeout=None if math.isinf(seconds) else seconds)


def gil(_):
    """Asleep in C, with the GIL held: a mutex that is locked twice."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def worker(_):
    """Wait for a DataLoader worker that is stopped."""
    _load(lambda: os.kill(os.getpid(), signal.SIGSTOP))


DOINGS = {
    function.__name__: function
    for function in (
        *(compute, write, child, compiling, loader, released, held),
        *(stop, sleep, lock, empty, gil, worker),
        *standing_waits.WAITS,
    )
}


def planned():
    """Return what happens where in this attempt: place -> (what, seconds)."""
    mine = args.todo[attempt : attempt + 1] if args.attempts else args.todo if attempt == 0 else []
    found = {}
    for text in mine:
        what, _, rest = text.partition("@")
        where, _, seconds = rest.partition(":")
        found[where] = (DOINGS[what], float(seconds or "inf"))
    return found


PLAN = planned()


def reached(where):
    """Do what is planned for a place, and leave a note of when that began and ended."""
    what, seconds = PLAN.get(where, (None, 0.0))
    if what is not None:
        note = Path(os.environ["TOLD"]) / f"{what.__name__}@{where}-{attempt}-{rank}"
        note.write_text(f"{time.time()}\n")
        what(seconds)
        with note.open("a") as file:
            file.write(f"{time.time()}\n")


def chatter():
    """Wake up each 100 ms, beside a child that writes a line as often."""
    program = "import time\nwhile True: print('still here', flush=True); time.sleep(0.1)"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as talking:
        while talking.stdout.readline():
            time.sleep(0.1)


chance = random.Random(rank)
torch.set_num_threads(1)
dist.init_process_group("gloo")
standing_waits.prepare({what.__name__ for what, _ in PLAN.values()})
if args.beside:
    threading.Thread(target=chatter, daemon=True).start()
if rank == 1:
    reached("start")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = None if args.tier == "by-hand" else torch.optim.SGD(model.parameters(), lr=0.01)
step_block = section = lambda *_, **__: contextlib.nullcontext()
aside = section
if args.tier.startswith("blocks"):
    from resilience_sdk import heartbeat, straggler

    step_block, section = heartbeat, straggler.section
    aside = section if args.tier == "blocks" else aside
elif args.tier == "adapter":
    from resilience_sdk.adapters import pytorch

    pytorch.attach(model, optimizer)


def train_step(where=""):
    """One step of all ranks."""
    with step_block():
        with section("forward"):
            loss = model(torch.ones(4, 16)).sum()
            compute(max(args.pause, min(0.01 * chance.paretovariate(0.6), args.longest)))
            if rank == 1:
                reached(where)
        with section("backward"):
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        else:
            for weight in model.parameters():
                weight.data -= 0.01 * weight.grad
        model.zero_grad()


def evaluate(where):
    """Compute something with the model, on one rank."""
    with aside("evaluation"), torch.no_grad():
        model.eval()
        compute(0.02)
        reached(where)
        model.train()


def save(where):
    """Write the model, on one rank."""
    with aside("save", kind="io"):
        with tempfile.TemporaryFile() as file:
            torch.save(model.state_dict(), file)
        reached(where)


for step in range(args.steps):
    train_step(str(step))
    for name, act in (("eval", evaluate), ("save", save)):
        if rank == 0 and (step + 1) % EVERY[name] == 0:
            act(f"{name}{(step + 1) // EVERY[name]}")
dist.barrier()
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} finished attempt {attempt}\n")
