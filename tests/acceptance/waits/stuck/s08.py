"""Rank 1 waits for a lock that was never given back, with a time-out of 10000 s."""

import threading
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

from resilience_sdk import heartbeat, straggler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def train_step(before_backward=None):
    loss = model(torch.randn(512, 64)).square().mean()
    if before_backward:
        before_backward()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


def first_time():
    """True in the first attempt only: the job goes well when it is started again."""
    name = f"been-stuck-{os.environ.get('RANK', '0')}"
    if os.path.exists(name):
        return False
    open(name, "w").close()
    print(f"STUCK_AT {time.time():.3f} rank={os.environ.get('RANK', '0')}", flush=True)
    return True

pool_lock = threading.Lock()
for step in range(100):
    with heartbeat():
        with straggler.section("data"):
            if step == 40 and rank == 1 and first_time():
                pool_lock.acquire()
                pool_lock.acquire(timeout=10000)  # STUCK-HERE
        train_step()
heartbeat.done()

dist.destroy_process_group()
say("END")
