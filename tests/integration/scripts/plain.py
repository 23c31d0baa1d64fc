"""A training that knows nothing of the SDK: `plain.py [--sgd] [--hang STEP] [--upload S [--alone]]`.

Rank 1 hangs in its first attempt only; the next one is short.
"""

import argparse
import os
import subprocess
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--hang", type=int, default=-1, help="rank 1 stops at this step of the first attempt")
parser.add_argument("--upload", type=float, default=0.0, help="seconds after the last step")
parser.add_argument("--alone", action="store_true", help="rank 0 uploads while the others wait for it")
parser.add_argument("--sgd", action="store_true", help="steps with a torch optimizer, else only collectives")
args = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
marker = f"{os.environ['TOLD']}/hung"


def hang() -> None:
    """Stop for good, once."""
    open(marker, "w").close()
    while True:
        time.sleep(1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.01) if args.sgd else None
dist.barrier()
for step in range(300 if os.path.exists(marker) else args.steps):
    if rank == 1 and step == args.hang and not os.path.exists(marker):
        hang()
    weight.grad = torch.ones(8)
    dist.all_reduce(weight.grad)
    if optimizer is not None:
        optimizer.step()
    time.sleep(0.01)
if not args.alone:
    time.sleep(args.upload)
elif rank == 0:  # on a pipe that another process feeds: when that will be, nobody sees
    with subprocess.Popen(["sh", "-c", f"sleep {args.upload}; echo"], stdout=subprocess.PIPE) as upload:
        upload.stdout.read(1)
if args.alone:
    dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} finished")
