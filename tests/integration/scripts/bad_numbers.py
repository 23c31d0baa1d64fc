"""A training of gloo ranks in which rank 1 reads NaN at the steps of `BAD`; `POLICY` is what is done about it."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import numerics, start_run

STEPS = 40

rank = int(os.environ["RANK"])
bad = {int(step) for step in os.environ["BAD"].split(",")}
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.ones(STEPS, 4)
if rank == 1:
    data[sorted(bad)] = float("nan")
trained = []
with start_run(state={"model": model, "optimizer": optimizer}, checkpoint_every=1) as run:
    for step, row in run.steps(data):
        optimizer.zero_grad()
        loss = (model(row) - 1).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        numerics.check(loss=loss, grad_norm=norm, policy=os.environ["POLICY"])
        optimizer.step()
        trained.append(step)
finite = all(bool(p.isfinite().all()) for p in model.parameters())
(Path(os.environ["PROBE_OUT"]) / f"end-{rank}").write_text(json.dumps([trained, finite]))
dist.destroy_process_group()
