"""A training of gloo ranks: every step computes a little and sums over all ranks.

`--until` goes on until the file is there, `--workers` reads from a DataLoader (with `--stubborn` its workers do
not hear SIGTERM). Rank 1 hangs in attempt 0 when the file of `--hang-when` is there, and at step 5 of the
attempts of `--nested` (in a section that is meant to take 1 s, opening and closing inner ones for ever) and of
`--threads` (asleep, while another thread beats on).
"""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--until")
parser.add_argument("--hang-when", default="")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--nested", type=int)
parser.add_argument("--threads", type=int)
args = parser.parse_args()

rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


class Numbers(torch.utils.data.Dataset):
    """As many items as anybody wants."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if not (told / f"worker-{attempt}-{rank}").exists():
            if args.stubborn:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell(f"worker-{attempt}-{rank}", os.getpid())
        return float(index)


def batches():
    """Yield what a step trains on."""
    if args.workers:
        yield from torch.utils.data.DataLoader(Numbers(), num_workers=args.workers)
    while True:
        yield torch.ones(1)


def may_go_on(step: int) -> bool:
    """Decide alike on all ranks whether there is another step."""
    if not args.until:
        return step < args.steps
    there = torch.tensor([float(Path(args.until).exists())])
    dist.all_reduce(there)
    return not there.item()


def never_come_back() -> None:
    """Stay in a section while inner ones come and go."""
    with straggler.section("outer", timeout=1.0):
        while True:
            with straggler.section("inner"):
                time.sleep(0.02)


def beat_on() -> None:
    """Beat in a thread of its own, whatever the training does."""
    while True:
        with heartbeat("background"):
            time.sleep(0.01)


tell(f"rank-{attempt}-{rank}", os.getpid())
torch.set_num_threads(1)
dist.init_process_group("gloo")
if attempt == args.threads:
    threading.Thread(target=beat_on, daemon=True).start()
data, step = batches(), 0
while may_go_on(step):
    with heartbeat():
        with straggler.section("compute"):
            batch = next(data)
            time.sleep(0.005)
        if (rank, step) == (1, 5) and attempt == args.nested:
            never_come_back()
        if (rank, step) == (1, 5) and attempt == args.threads:
            time.sleep(3600)
        if (rank, attempt) == (1, 0) and os.path.exists(args.hang_when):
            time.sleep(3600)
        dist.all_reduce(batch)
    step += 1
    tell(f"step-{attempt}-{rank}", step)
data.close()
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} finished attempt {attempt}\n")  # in one write, as no `print` is under -u
