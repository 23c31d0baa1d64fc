"""A loop of gloo ranks with `preemption.check()`, which tells how far it is and where it stopped.

`--without RANK`: that rank never calls it; `--no-monitor`: none can be started; `--return`: leaves with 0.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat, preemption

parser = argparse.ArgumentParser()
parser.add_argument("--without", type=int)
parser.add_argument("--no-monitor", action="store_true")
parser.add_argument("--return", action="store_true", dest="returns")
args = parser.parse_args()
if args.no_monitor:
    sys.executable = "/nowhere/python"  # which would run it

rank = int(os.environ["RANK"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


torch.set_num_threads(1)
dist.init_process_group("gloo")
tell(f"rank-{rank}", os.getpid())
step = 0
while True:
    with heartbeat():
        time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
    step += 1
    tell(f"step-{rank}", step)
    if rank != args.without and preemption.check():
        tell(f"left-{rank}", f"{step} {preemption.time_left()}")
        if args.returns:
            break
        preemption.exit()
