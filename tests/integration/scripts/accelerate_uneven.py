"""Two ranks with different numbers of batches, joined in each pass: `accelerate_uneven.py EPOCHS`.

In the middle of its first epoch, the rank with fewer batches asks the job to leave.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk import preemption
from resilience_sdk.adapters import accelerate as resilience

epochs = int(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = nn.Linear(1, 1)
samples = TensorDataset(torch.linspace(0, 1, 26)[:, None])  # 4, 4, 4, 2 for rank 0, 4, 4, 4 for rank 1
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(samples, batch_size=4)
)


def tell(name: str, **facts: object) -> None:
    """Leave facts for the test."""
    (Path(os.environ["TOLD"]) / f"{name}-{accelerator.process_index}").write_text(json.dumps(facts))


plain = accelerator.join_uneven_inputs
handle = resilience.attach(accelerator, checkpoint_every=3)  # a pass of 4 steps seldom ends at a multiple
# On CPUs Accelerate joins nothing; this is all that it asks.
AcceleratorState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
with handle:
    first = handle.step
    for _ in range(handle.epoch, epochs):
        taken = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for (batch,) in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                taken += 1
                if first == 0 and taken == 2 and accelerator.process_index == 1:
                    preemption.request("a test")
tell("end", step=handle.step, epoch=handle.epoch, samples=handle.samples, first=first, taken=taken)
assert accelerator.join_uneven_inputs == plain
accelerator.end_training()
