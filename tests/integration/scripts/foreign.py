"""A training that uses the SDK and starts its ranks in any way: `foreign.py [--how env|spawn|fork] [--hang N] ...`

`env`: the launcher's variables say who a rank is, `spawn` and `fork`: torch.multiprocessing starts two of them. The
rank that hangs does so until the file `go` is there, and only in the first attempt.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["env", "spawn", "fork"], default="env")
parser.add_argument("--early", action="store_true", help="the parent uses the SDK before it starts the ranks")
parser.add_argument("--hang", type=int, default=-1, help="the last rank hangs at this step")
parser.add_argument("--crash", type=int, default=-1, help="the last rank raises at this step")
told = Path(os.environ["TOLD"])


def hang_here() -> None:
    """Stop until somebody says go."""
    (told / "hung").touch()
    while not (told / "go").exists():
        time.sleep(0.02)


def run_steps(rank: int, size: int, args: argparse.Namespace) -> None:
    """The loop of one rank."""
    for step in range(20):
        with heartbeat(), straggler.section("reduce"):
            if rank == size - 1 and step == args.hang and not (told / "hung").exists():
                hang_here()
            if rank == size - 1 and step == args.crash:
                raise ValueError("the loss is not a number")
            dist.all_reduce(torch.ones(2))
            time.sleep(0.01)


def main(rank: int, args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if args.how == "env":
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    else:
        size = 2
    if "MASTER_PORT" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{told}/store", rank=rank, world_size=size)
    run_steps(rank, size, args)
    dist.destroy_process_group()
    print(f"rank {rank} finished")


if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.early:
        with straggler.section("setup"):
            time.sleep(0.01)
    if arguments.how == "env":
        main(0, arguments)
    else:
        torch.multiprocessing.start_processes(main, (arguments,), nprocs=2, start_method=arguments.how)
