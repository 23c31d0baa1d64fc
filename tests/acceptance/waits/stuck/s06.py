"""Rank 1 waits for a decoder that somebody has stopped."""

import signal
import subprocess
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


def first_time():
    """True in the first attempt only: the job goes well when it is started again."""
    name = f"been-stuck-{os.environ.get('RANK', '0')}"
    if os.path.exists(name):
        return False
    open(name, "w").close()
    print(f"STUCK_AT {time.time():.3f} rank={os.environ.get('RANK', '0')}", flush=True)
    return True


def decode():
    child = subprocess.Popen(["sleep", "1"])
    child.send_signal(signal.SIGSTOP)
    try:
        child.wait()  # STUCK-HERE
    finally:
        child.kill()


with resilience_sdk.start_run(state=state, checkpoint_every=25) as run:
    for step, batch in run.steps(loader):
        if step == 40 and rank == 1 and first_time():
            decode()
        train_step(batch)

dist.destroy_process_group()
say("END")
