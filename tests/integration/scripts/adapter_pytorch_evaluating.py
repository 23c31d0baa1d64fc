"""Epochs whose last micro-batches make no step, each with an evaluation behind it that takes longer than a step may.

`SECONDS`: how long an evaluation takes. `--loader` attaches the loader too.
"""

from __future__ import annotations

import os
import sys
import time

import contract_script as contract
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk.adapters import pytorch

MICRO_BATCHES, EPOCHS = 3, 2


def evaluate() -> None:
    """Look at the model for as long as it takes."""
    model.eval()
    end_s = time.monotonic() + float(os.environ["SECONDS"])
    with torch.no_grad():
        while time.monotonic() < end_s:
            model(torch.randn(2, 8))
            time.sleep(0.01)
    model.train()


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(14, 8), batch_size=2)
with pytorch.attach(model, optimizer, loader if "--loader" in sys.argv else None) as handle:
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            model(batch).square().mean().backward()
            if (number + 1) % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        evaluate()
    contract.tell("steps", steps=handle.step)
dist.destroy_process_group()
