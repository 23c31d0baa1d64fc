"""A `Run` on one of two ranks: `unrecorded.py RENDEZVOUS_FILE`. The environment says what is recorded where."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import nn

import resilience_sdk

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
model = nn.Linear(1, 1)
with resilience_sdk.start_run(state={"model": model}, checkpoint_every=2) as run:
    for _ in run.steps(range(5)):
        dist.barrier()
print(f"{run.step} steps, saved: {run.checkpointer.last_good}")
dist.destroy_process_group()
