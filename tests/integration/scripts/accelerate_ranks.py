"""A shuffled epoch with Accelerate on any number of ranks: `accelerate_ranks.py OUT`; tells each step's samples."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters import accelerate as resilience

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
loader = DataLoader(TensorDataset(torch.arange(32.0)[:, None]), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
with resilience.attach(accelerator, checkpoint_every=1) as handle:
    for _ in range(handle.epoch, 1):
        for (batch,) in loader:
            with open(f"{sys.argv[1]}.{accelerator.process_index}", "a") as file:
                print(handle.step, *batch.flatten().int().tolist(), file=file)
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
