"""The first step tokenises its texts with a pool of processes that ask a slow service."""

import multiprocessing
import urllib.request
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


def tokenise(job):
    with urllib.request.urlopen(f"http://{WORLD}/slow?s={job}") as answer:
        return len(answer.read())


for step in range(80):
    with heartbeat():
        if step == 0 and rank == 0:
            say("WAIT")
            with straggler.section("tokenise"):
                with multiprocessing.get_context("fork").Pool(3) as pool:
                    print(pool.map(tokenise, [50 * SCALE] * 6, chunksize=1), flush=True)
            say("WENT ON")
        train_step()
heartbeat.done()

dist.destroy_process_group()
say("END")
