"""The same for NVRx: rank 1 sleeps for ever at a step, after noting when its last heartbeat was sent."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
import torch
import torch.distributed as dist

HANG_AT = 8


def main(out: Path) -> None:
    """Beat, step, and hang in each attempt."""
    dist.init_process_group("gloo")
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    rank = dist.get_rank()
    for step in range(HANG_AT + 1):
        client.send_heartbeat()
        if rank == 1 and step == HANG_AT:
            trace = {"pid": os.getpid(), "last_beat": time.monotonic()}
            (out / f"hung-{os.getpid()}.tmp").write_text(json.dumps(trace))
            (out / f"hung-{os.getpid()}.tmp").rename(out / f"hung-{os.getpid()}.json")
            time.sleep(3600)
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
