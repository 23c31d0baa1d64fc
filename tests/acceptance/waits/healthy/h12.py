"""Rank 0 writes into a table of results whose lock another job holds for a while."""

import fcntl
import urllib.request
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

import resilience_sdk
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

torch.manual_seed(0)
data = TensorDataset(torch.randn(6400, 64), torch.randn(6400, 1))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
state = {"model": model, "optimizer": optimizer, "data": loader}


def train_step(batch):
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


def write_result(step):
    path = os.path.abspath("results.lock")
    # the other job takes the lock, says so, and holds it
    urllib.request.urlopen(f"http://{WORLD}/lock?s={100 * SCALE}&path={path}").read()
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open("results.csv", "a") as table:
            table.write(f"{step}\n")


with resilience_sdk.start_run(state=state, checkpoint_every=25) as run:
    for step, batch in run.steps(loader):
        train_step(batch)
        if step == 60 and rank == 0:
            say("WAIT")
            write_result(step)
            say("WENT ON")

dist.destroy_process_group()
say("END")
