"""Starts two ranks twice from one process. The first two are asked to leave, or one dies; the next two work on.

spawned_twice.py HOW ENDS: `HOW` is fork or spawn, `ENDS` is asked or dies.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from resilience_sdk import heartbeat, preemption

CHECKS = 120
told = Path(os.environ["TOLD"])


def loop(rank: int, start: int, ends: str) -> None:
    """Work until a stop is agreed; tell how many checks that took. The second start asks in its middle only."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{told}/store-{start}", rank=rank, world_size=2)
    for count in range(1, 100 * CHECKS):
        with heartbeat():
            time.sleep(0.005)
            dist.all_reduce(torch.ones(1))
        if start == 0 and rank == 0 and count == 30 and ends == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if rank == 0 and count == (30 if start == 0 else CHECKS):
            preemption.request(f"start {start}")
        if preemption.check():
            (told / f"left-{start}-{rank}").write_text(str(count))
            preemption.exit()


if __name__ == "__main__":
    for start in range(2):
        try:
            mp.start_processes(loop, args=(start, sys.argv[2]), nprocs=2, start_method=sys.argv[1])
        except mp.ProcessExitedException as error:
            print(f"start {start} ended with {error.exit_code}", flush=True)
