"""Ranks under `start_run` with what each has of its own: `exact_ranks.py OUT`.

Buffers that DDP does not equalize, an average of them, plain values, a memory, a tensor and a schedule by its own
metric; an order from a sampler's own generator, and gradients of three batches added up by hand. Each step leaves a
line.
"""

import collections
import hashlib
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler

import resilience_sdk


class Shuffled(Sampler):
    """Another order in each pass, drawn by itself."""

    def __init__(self, size: int) -> None:
        self.random = random.Random(5)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(self.random.sample(range(self.size), self.size))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_printoptions(precision=17, threshold=1 << 20)  # to the last bit
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(rates, patience=0)
mean, memory = torch.zeros(()), collections.deque(maxlen=4)
state = {"model": model, "average": average, "optimizer": optimizer, "rates": rates, "schedule": schedule}
data = torch.arange(40.0) + 100 * rank
with resilience_sdk.start_run(state={**state, "mean": mean, "memory": memory}, checkpoint_every=4) as run:
    for step, batch in run.steps(DataLoader(data, batch_size=4, sampler=Shuffled(40)), epochs=3):
        time.sleep(0.02)  # as long as a stop takes to be agreed upon
        loss = model(batch[:, None] / 100).square().mean()
        loss.backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
        mean += loss.detach() / 10
        memory.append(batch)
        schedule.step(float(batch.sum()))
        run.values["greatest"] = max(run.values.get("greatest", 0.0), batch.max().item())
        parts = [batch, loss, net.state_dict(), average.state_dict(), schedule.state_dict(), mean, memory, run.values]
        with open(f"{sys.argv[1]}.{rank}", "a") as file:
            print(step, *(hashlib.sha1(repr(part).encode()).hexdigest()[:8] for part in parts), file=file)
