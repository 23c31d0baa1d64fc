"""A loop of `Run.steps` whose ranks have different ways back to their place, and compile differently long.

`uneven_resume.py --steps N`. Sleeps stand for work. In an attempt that resumes, rank 1 takes five times as long to read
a batch again; in each one it compiles for a second longer in its first step. Beside the `data` section of `Run.steps`
the script has one of its own, and its loader times its waits, too.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import resilience_sdk
from resilience_sdk import straggler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=240)
args = parser.parse_args()
rank = int(os.environ["RANK"])


class Batches:
    """A loader without `state_dict`: an attempt that resumes reads its first batches again."""

    is_training = False

    def __iter__(self):
        while True:
            time.sleep(0.02 if self.is_training or rank == 0 else 0.1)
            yield torch.ones(4, 8)


class Timed:
    """A loader in which the script times by itself how long a batch takes."""

    def __iter__(self):
        return straggler.iterate(batches)


torch.set_num_threads(1)
dist.init_process_group("gloo")
batches = Batches()
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with resilience_sdk.start_run(state={"model": model, "optimizer": optimizer}) as run:
    first = run.step
    for step, batch in run.steps(Timed(), max_steps=args.steps):
        batches.is_training = True
        with straggler.section("data"):
            time.sleep(0.005)
        with straggler.section("fwd"):
            time.sleep(0.01 + (rank if step == first else 0))
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
dist.destroy_process_group()
