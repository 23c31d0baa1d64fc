"""A check for leaks behind step 50: rank 1 collects a big heap of garbage again and again, with the GIL."""

import gc
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

gc.disable()
heap = [[{"n": i}, (i, str(i))] for i in range(800_000)] if rank == 1 else None
for step in range(100):
    with heartbeat():
        train_step()
    if step == 50 and rank == 1:
        say("WAIT")
        with straggler.section("leaks"):
            until = time.monotonic() + 75 * SCALE
            while time.monotonic() < until:
                gc.collect()
        say("WENT ON")
heartbeat.done()

dist.destroy_process_group()
say("END")
