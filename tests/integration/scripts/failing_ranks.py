"""Four gloo ranks that fail in another way in every attempt, and finish when there is no other way left.

Each way is a function of the rank that fails; the others wait for it in a collective. Everything is real: signals,
mounts, limits, memory that the kernel takes back, workers that die. `sys.argv[1]` names the ways, in order.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from resilience_sdk import heartbeat, straggler

FOLDER = Path(os.environ["TOLD"]).parent
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
FAILING = 2


class Samples(Dataset):
    """A data set whose worker does something."""

    def __init__(self, do):
        self.do = do

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.do()


def load(do):
    """Read one batch through a worker."""
    next(iter(DataLoader(Samples(do), num_workers=1)))


def raises():
    raise ValueError("negative length in sample 17")


def shapes():
    torch.ones(3, 4) @ torch.ones(5, 6)


def dies(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def crashes():
    ctypes.string_at(0)


def bus():
    """Touch a page of a file that is not there any more."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        pages = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        pages[0]


def refused_memory():
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    torch.empty(8 << 30, dtype=torch.uint8)


def killed_for_memory():
    """Join the control group that the test has made, and ask for more than it may have."""
    Path(os.environ["SMALL_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    torch.ones(64 << 20)


def worker_killed():
    load(lambda: os.kill(os.getpid(), signal.SIGKILL))


def worker_crashes():
    load(crashes)


def small_shm():
    """Shared memory of a megabyte, seen by this rank alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, (1 << 14) | (1 << 18), None) == 0  # MS_REC | MS_PRIVATE
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
    load(lambda: torch.ones(4 << 20))


def stuck():
    time.sleep(3600)


def other_operation():
    dist.broadcast(torch.ones(1), src=FAILING)


def leaves_early():
    dist.destroy_process_group()
    raise SystemExit(0)


def no_space():
    (FOLDER / "tiny" / "checkpoint.pt").write_bytes(b"x")


def read_only():
    (FOLDER / "fixed" / "checkpoint.pt").write_bytes(b"x")


def input_output():
    """Read where this process has no memory: the kernel answers with EIO."""
    with open("/proc/self/mem", "rb", buffering=0) as file:
        file.read(1)


def no_permission():
    secret = FOLDER / "secret"
    secret.touch(mode=0o600)
    os.chmod(FOLDER, 0o755)
    os.seteuid(65534)
    try:
        secret.read_bytes()
    finally:
        os.seteuid(0)


def corrupt():
    path = FOLDER / "state.pt"
    torch.save({"weight": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    torch.load(path)


def missing_key():
    torch.nn.Linear(2, 2).load_state_dict({"weight": torch.ones(2, 2)})


def port_taken():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(first.getsockname())


def no_name():
    socket.create_connection(("no-such-host.invalid", 80))


def not_a_number():
    with torch.autograd.detect_anomaly():
        torch.zeros(1, requires_grad=True).sqrt().mul(0).sum().backward()


WAYS = {
    "raises": raises,
    "all_raise": raises,
    "shapes": shapes,
    "sigkill": lambda: dies(signal.SIGKILL),
    "segfault": crashes,
    "bus": bus,
    "abort": os.abort,
    "refused_memory": refused_memory,
    "killed_for_memory": killed_for_memory,
    "worker_killed": worker_killed,
    "worker_crashes": worker_crashes,
    "small_shm": small_shm,
    "stuck_reading": stuck,
    "other_operation": other_operation,
    "leaves_early": leaves_early,
    "no_space": no_space,
    "read_only": read_only,
    "input_output": input_output,
    "no_permission": no_permission,
    "corrupt": corrupt,
    "missing_key": missing_key,
    "port_taken": port_taken,
    "no_name": no_name,
    "not_a_number": not_a_number,
}


def main():
    """Take a step or two, and fail in the way of this attempt."""
    ways = sys.argv[1].split(",")
    way = ways[ATTEMPT] if len(ways) > ATTEMPT else None
    torch.set_num_threads(1)
    if way == "shapes" and RANK == FAILING:
        shapes()  # before anything else was done
    dist.init_process_group("gloo")
    for step in range(4):
        now = step == 2 and way is not None and (RANK == FAILING or way == "all_raise")
        with heartbeat():
            with straggler.section("data", kind="io"):
                if now and way == "stuck_reading":
                    WAYS[way]()
            if now:
                WAYS[way]()
            dist.all_reduce(torch.ones(8))
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


main()
