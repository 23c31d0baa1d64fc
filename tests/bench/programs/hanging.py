"""Two ranks that meet in an all_reduce each step; which one hangs is said by RESILIENCE_FAULT.

Each rank keeps the moment (CLOCK_MONOTONIC) at which it entered its current step in a file of its own.
"""

from __future__ import annotations

import os
import struct
import sys
import time

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat

STEPS = 40


def main(out: str) -> None:
    """Step, and leave a trace of each."""
    dist.init_process_group("gloo")
    trace = os.open(os.path.join(out, f"entered-{dist.get_rank()}"), os.O_WRONLY | os.O_CREAT, 0o600)
    for _ in range(STEPS):
        os.pwrite(trace, struct.pack("d", time.monotonic()), 0)
        with heartbeat():
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
    heartbeat.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
