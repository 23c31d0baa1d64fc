"""Ranks of which the last keeps each batch: 2 MiB a step; once that was seen, it asks for more than it is given.

`leaking.py [device]`: where the batches are, the host by default.
"""

import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat

MOST_STEPS, STEP_S, KEPT = 800, 0.1, 2 << 20
dist.init_process_group("gloo")
leaks = dist.get_rank() == dist.get_world_size() - 1
device = "cuda" if "device" in sys.argv[1:] else "cpu"
seen = Path(os.environ["TOLD"]) / "seen"
kept = []
for step in range(MOST_STEPS):
    with heartbeat(step=step):
        batch = torch.ones(KEPT // 4, device=device)
        if leaks:
            kept.append(batch)
        ends = torch.tensor(float(seen.exists()))
        dist.all_reduce(ends)
        if ends:
            break
        time.sleep(STEP_S)
if leaks:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), resource.RLIM_INFINITY))
    torch.ones(1 << 36, device=device)
dist.barrier()
