"""Rank 0 opens the next shard between two steps; the server says 429 and Retry-After, it sleeps for that long."""

import urllib.error
import urllib.request
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

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


def open_shard(name, wait):
    url = f"http://{WORLD}/limited?key={name}&s={wait}"
    for attempt in range(6):
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            pause = float(error.headers["Retry-After"])
            print(f"429, trying again in {pause} s", flush=True)
            time.sleep(pause)
    raise RuntimeError("no shard")


for step in range(120):
    if step == 60 and rank == 0:
        say("WAIT")
        open_shard(f"shard-{os.getpid()}", 90 * SCALE)
        say("WENT ON")
    train_step()

dist.destroy_process_group()
say("END")
