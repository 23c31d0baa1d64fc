"""A `Run` on one of two ranks that is asked to leave: `unrecorded.py FOLDER`. The environment says what it lacks."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import nn

import resilience_sdk
from resilience_sdk import preemption

rank = int(os.environ["RANK"])
told = Path(sys.argv[1], "port")
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    told.with_suffix(".new").write_text(str(store.port))
    told.with_suffix(".new").rename(told)
else:
    while not told.exists():
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(told.read_text()), 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = nn.Linear(1, 1)
with resilience_sdk.start_run(state={"model": model}, checkpoint_every=2) as run:
    dist.barrier()  # from here on they are in one step, whichever came first
    first = run.step
    print("resumed after", first, flush=True)
    for step, _ in run.steps(itertools.count(), on_preempt="return"):
        if step == first + 3 and rank == int(os.environ["ASKS"]):
            preemption.request("a test")
        dist.barrier()
good = run.checkpointer.last_good
print("left after", run.step, "saved after", good and good.step, flush=True)
dist.barrier()  # the store is the first one's
dist.destroy_process_group()
