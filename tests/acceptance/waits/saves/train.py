"""A loop that saves: STEPS steps of PACE seconds, a state of MB megabytes, a save each EVERY steps and at the end."""

import os
import time

import resilience_sdk
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("STEPS", "200"))
PACE = float(os.environ.get("PACE", "0.06"))
MB = int(os.environ.get("MB", "8"))
EVERY = int(os.environ.get("EVERY", "50"))
VERBOSE = int(os.environ.get("VERBOSE", "0"))

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print(f"PID rank={rank} pid={os.getpid()}", flush=True)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(STEPS * world * 4, 16), torch.randn(STEPS * world * 4, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
state = {"model": model, "optimizer": optimizer, "data": loader, "ballast": torch.rand(MB * 1024 * 256)}
with resilience_sdk.start_run(state=state, checkpoint_every=EVERY) as run:
    first = True
    for step, (inputs, targets) in run.steps(loader):
        if first and rank == 0:
            print(f"FROM {step}", flush=True)
        first = False
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(PACE)
        if VERBOSE:
            print("v" * VERBOSE, flush=True)
        if rank == 0 and step % 5 == 0:
            print(f"STEP {step}", flush=True)
dist.destroy_process_group()
print(f"END rank={rank}", flush=True)
