"""README's loop under DDP with steps of heavy tails: `heavy_tails.py [--tails lognormal|spikes] [--section NAME]`.

Each rank's forward takes a time of its own: lognormal, or thirty times as long now and then. `--slow RANK` is slow in
its forward beside that. `--section` is what stands around `backward()`, with `--whole` around the whole step. A file
`enough` in TOLD ends it.
"""

import argparse
import contextlib
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--tails", choices=("lognormal", "spikes"), default="spikes")
parser.add_argument("--section", default="bwd")
parser.add_argument("--whole", action="store_true")
parser.add_argument("--slow", type=int)
parser.add_argument("--usual", type=float, default=0.01)
parser.add_argument("--steps", type=int, default=10_000)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
told = Path(os.environ["TOLD"])
chance = random.Random(rank)  # each rank has steps of its own: nobody is late for long
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def forward(batch):
    """Take as long as it takes on this rank."""
    factor = chance.lognormvariate(0.0, 0.8)
    if args.tails == "spikes":
        factor = 30.0 if chance.random() < 0.03 else chance.lognormvariate(0.0, 0.1)
    time.sleep(args.usual * factor + (0.05 if rank == args.slow else 0.0))
    return model(batch).square().mean()


for step in range(args.steps):
    batch = torch.ones(8, 64)
    with heartbeat(), straggler.section(args.section) if args.whole else contextlib.nullcontext():
        with straggler.section("fwd"):
            loss = forward(batch)
        with contextlib.nullcontext() if args.whole else straggler.section(args.section):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        (told / "step").write_text(str(step))
    leave = torch.tensor([float((told / "enough").exists())])
    dist.all_reduce(leave)
    if leave.item():
        break
dist.destroy_process_group()
