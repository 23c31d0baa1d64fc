"""A training in which much happens: rank 1 is slow from attempt 2 on; faults of the environment do the rest."""

import os
import time

import torch
import torch.distributed as dist

from resilience_sdk import start_run, straggler

dist.init_process_group("gloo")
rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
weight = torch.zeros(1)
with start_run(state={"weight": weight}, checkpoint_every=10) as run:
    for _ in run.steps(range(1 << 20)):
        with straggler.section("fwd"):
            time.sleep(0.04 if rank == 1 and attempt >= 2 else 0.02)
        with straggler.section("bwd", kind="comm"):
            dist.all_reduce(weight)
dist.destroy_process_group()
