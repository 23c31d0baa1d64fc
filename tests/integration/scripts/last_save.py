"""A training of 60 steps whose disk is full before its last save.

TOLD/disk names the disk. Rank 0 takes all that is free of it at step 45 of the first attempt (`--takes`: bytes or
inodes). With several ranks the process group's timeout is `--patience` seconds. `--by` saves with a `Checkpointer`
alone: `last` says that the last save is the last, `save` does not, and `torch` saves by itself after that.
"""

import argparse
import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_disks import fill

import resilience_sdk
from resilience_sdk import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--takes", default="bytes")
parser.add_argument("--patience", type=float, default=60)
parser.add_argument("--by", default="run")
args = parser.parse_args()

told = Path(os.environ["TOLD"])
several = int(os.environ.get("WORLD_SIZE", "1")) > 1
if several:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.patience))
model = torch.nn.Linear(128, 128)


def train(step):
    """Make a step; the first time that it is step 45, fill the disk after it."""
    if several:
        dist.all_reduce(torch.ones(1))
    if step == 45 and int(os.environ.get("RANK", "0")) == 0 and not (told / "filled").exists():
        fill((told / "disk").read_text(), args.takes)
        (told / "filled").touch()


if args.by == "run":
    with resilience_sdk.start_run(state={"model": model}, checkpoint_every=40) as run:
        print(f"begins at {run.step}", flush=True)
        for step, _ in run.steps([0] * 60):
            train(step)
else:
    saver = checkpoint.Checkpointer({"model": model}, every=40)
    for step in range(saver.resume(), 60):
        train(step)
        saver.maybe_save(step + 1)
    saver.save(60, last=args.by == "last")
    if args.by == "torch":
        torch.save(model.state_dict(), told / "model.pt")
print("trained", flush=True)
