"""A training that saves by `start_run`: in its first attempt rank 1 is killed, in its second one it stops for ever."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import resilience_sdk

rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
with resilience_sdk.start_run(state={"model": model}, checkpoint_every=2) as run:
    for step, batch in run.steps([torch.ones(1)] * 14):
        dist.all_reduce(batch)
        if (rank, attempt, step) == (1, 0, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        if (rank, attempt, step) == (1, 1, 9):
            time.sleep(3600)
        time.sleep(0.02)
dist.destroy_process_group()
if rank == 0:
    Path(sys.argv[1]).write_text(resilience_sdk.__file__)
