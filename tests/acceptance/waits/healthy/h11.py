"""A DataLoader of two workers; the first item of rank 1 comes slowly from a remote store."""

import urllib.request
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

from torch.utils.data import DataLoader, Dataset

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


class Remote(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        if index == 0 and rank == 1:
            urllib.request.urlopen(f"http://{WORLD}/slow?s={140 * SCALE}").read()
        return torch.randn(64)


loader = DataLoader(Remote(), batch_size=8, num_workers=2)
say("WAIT")
for step, batch in enumerate(straggler.iterate(loader)):
    if step == 0:
        say("WENT ON")
    with heartbeat():
        train_step()
heartbeat.done()

dist.destroy_process_group()
say("END")
