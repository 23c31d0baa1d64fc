"""A loop of its own with a `Checkpointer`: rank 1 stands still before a save that is due, in the first attempt."""

import os
import time

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat
from resilience_sdk.checkpoint import Checkpointer

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
model = torch.nn.Linear(4, 1)
checkpointer = Checkpointer({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, every=4)
for step in range(checkpointer.resume(), 8):
    with heartbeat("step", step=step):
        total = model(torch.ones(2, 4)).sum()
        dist.all_reduce(total.detach())
    if (rank, attempt, step) == (1, 0, 3):
        time.sleep(3600)
    checkpointer.maybe_save(step + 1)
heartbeat.done()
dist.destroy_process_group()
