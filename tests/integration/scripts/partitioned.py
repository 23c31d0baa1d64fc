"""Two gloo ranks in two network namespaces: `partitioned.py OTHER_NAMESPACE ADDRESS CUT`.

Rank 1 moves into the other namespace before it makes its process group. In attempt 0 both wait at step 5 until
the file CUT is there; then both sum over the link that was cut.
"""

import ctypes
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat

_CLONE_NEWNET = 0x40000000
namespace, address, cut = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
if rank == 1:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
os.environ["MASTER_ADDR"] = address
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(minutes=5))
for step in range(10):
    if (step, attempt) == (5, 0):
        (Path(os.environ["TOLD"]) / f"ready-{rank}").touch()
        while not Path(cut).exists():
            time.sleep(0.01)
    with heartbeat():
        dist.all_reduce(torch.ones(1000))
print(f"rank {rank} finished attempt {attempt}")
