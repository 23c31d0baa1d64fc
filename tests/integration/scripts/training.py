"""A training of two or more gloo ranks: every step computes a little and sums over all ranks.

    training.py [--steps N] [--until FILE] [--workers N] [--outer]

`--until` goes on until the file is there; `--workers` reads from a DataLoader; `--outer` puts the step into a
section `outer` that is meant to take 1 s at most, and rank 1 opens and closes inner ones for ever in it.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--until")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--outer", action="store_true")
args = parser.parse_args()

rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


class Numbers(torch.utils.data.Dataset):
    """Items for ever, read by workers that do not hear SIGTERM, as one that writes a file would not."""

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        if not (told / f"worker-{attempt}-{rank}").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell(f"worker-{attempt}-{rank}", os.getpid())
        return float(index)


def may_go_on(step: int) -> bool:
    """Decide alike on all ranks whether there is another step."""
    if not args.until:
        return step < args.steps
    there = torch.tensor([float(Path(args.until).exists())])
    dist.all_reduce(there)
    return not there.item()


def never_come_back() -> None:
    """Stay in a section while inner ones come and go."""
    while True:
        with straggler.section("inner"):
            time.sleep(0.02)


tell(f"rank-{attempt}-{rank}", os.getpid())
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = iter(torch.utils.data.DataLoader(Numbers(), num_workers=args.workers)) if args.workers else None
step = 0
while may_go_on(step):
    with heartbeat(), straggler.section("outer", timeout=1.0):
        with straggler.section("compute"):
            batch = next(data) if data is not None else torch.ones(1)
            time.sleep(0.005)
        if args.outer and attempt == 0 and rank == 1 and step == 5:
            never_come_back()
        dist.all_reduce(batch)
    step += 1
    tell(f"step-{attempt}-{rank}", step)
dist.destroy_process_group()
print(f"rank {rank} finished attempt {attempt}")
