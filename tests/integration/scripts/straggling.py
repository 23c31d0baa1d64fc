"""A small DDP training with sections by hooks, whose ranks can be slowed down: `straggling.py [--steps N] [--pause S]`.

Faults come by RESILIENCE_FAULT. `--save N`: a section `checkpoint` every N steps; `--check`: listens for a stop;
`--mute RANK`: that rank never uses the SDK; `--listen`: each rank tells what `straggler.on_verdict` and `report()` have
told it; `--burn S`: that much of CPU time in a section `burn`; `--device cuda`: all ranks share the first one. A file
`enough` in TOLD ends it early.
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import heartbeat, preemption, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--burn", type=float, default=0.0)
parser.add_argument("--check", action="store_true")
parser.add_argument("--listen", action="store_true")
parser.add_argument("--mute", type=int)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

rank = int(os.environ["RANK"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


def batches():
    """Yield what the loop trains on."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        time.sleep(0.002)
        yield torch.randn(8, 64, generator=generator)


def burn(seconds: float) -> None:
    """Use the processor for that long, in time of this process."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
tell(f"rank-{rank}", os.getpid())
net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(args.device)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
is_mute = rank == args.mute
if not is_mute:
    straggler.attach(model, optimizer)
if args.listen:

    @straggler.on_verdict
    def hear(change):
        """Tell what was heard, and about whom."""
        about = ".".join(map(str, change.verdict.ranks))
        tell(f"verdict-{rank}-{change.what}-{about}", change.verdict.text())


def section(name, kind="compute"):
    """A section, but of a rank that is mute."""
    return contextlib.nullcontext() if is_mute else straggler.section(name, kind=kind)


loader = iter(batches() if is_mute else straggler.iterate(batches()))
for step in range(args.steps):
    with contextlib.nullcontext() if is_mute else heartbeat():
        batch = next(loader)
        if args.burn:
            with section("burn"):
                burn(args.burn)
        model(batch.to(args.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with section("work"):
            time.sleep(args.pause)
        if args.save and step % args.save == 0:
            with section("checkpoint", "io"):
                time.sleep(0.005)
    tell(f"step-{rank}", step)
    if args.listen and (report := straggler.report()) is not None:
        tell(f"report-{rank}", report.text())
    if args.check and preemption.check():
        tell(f"left-{rank}", step)
        preemption.exit()
    # All leave at one step, whenever the file came.
    leave = torch.tensor([float((told / "enough").exists())])
    dist.all_reduce(leave)
    if leave.item():
        break
dist.destroy_process_group()
