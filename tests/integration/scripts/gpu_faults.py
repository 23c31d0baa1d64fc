"""A loop on a GPU whose attempts end in another way each: `gpu_faults.py FAULT...`; the one after them is whole.

`stuck`: a kernel that does not end; `memory`: more than the device has; `index`: a lookup outside of an embedding.
"""

import os
import sys

import torch
from torch import nn

from resilience_sdk.adapters import pytorch

TWENTY_MINUTES = 20 * 60 * 1_980_000_000  # in cycles of the fastest clock

model = nn.Sequential(nn.Embedding(64, 512), nn.Linear(512, 512)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
pytorch.attach(model, optimizer)
faults = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fault = faults[attempt] if attempt < len(faults) else None
for step in range(40):
    batch = torch.randint(64, (256,), device="cuda")
    if step == 20 and fault == "stuck":
        torch.cuda._sleep(TWENTY_MINUTES)
    if step == 20 and fault == "memory":
        torch.empty(1 << 45, device="cuda")
    if step == 20 and fault == "index":
        batch += 64
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
