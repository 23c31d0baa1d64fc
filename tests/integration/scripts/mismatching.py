"""Two ranks whose program does not match: rank 1 has fewer batches, or rank 0 alone evaluates. `mismatching.py HOW`."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)


def evaluate():
    """Return the mean over all ranks of a metric."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


for step in range(40 - 20 * rank if sys.argv[1] == "uneven" else 40):
    loss = model(torch.randn(16, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sys.argv[1] == "evaluates" and step == 25 and rank == 0:
        evaluate()
dist.barrier()
dist.destroy_process_group()
