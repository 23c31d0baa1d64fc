"""Two ranks whose program does not match. `mismatching.py HOW`.

`uneven`: rank 1 has fewer batches, and the ranks stand still. `times_out`: the same, where the library gives up before
anybody else does. `evaluates`: rank 0 alone evaluates, and gloo aborts. `unseen`: in a loop without an optimizer. And
`late`: they match, but rank 1 comes too late for the library.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6 if how in ("times_out", "late") else 1800))
rank = dist.get_rank()


def evaluate():
    """Return the mean over all ranks of a metric."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(steps):
    """Train that many steps."""
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(steps):
        loss = model(torch.randn(16, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if how == "evaluates" and step == 25 and rank == 0:
            evaluate()
        if how == "late" and step == 15 and rank == 1:
            time.sleep(12)


if how == "unseen":
    for _ in range(40 - 20 * rank):
        dist.all_reduce(torch.ones(3))
else:
    train(40 - 20 * rank if how in ("uneven", "times_out") else 40)
dist.barrier()
dist.destroy_process_group()
