"""A small training of gloo ranks by `start_run`, which writes the loss of each step as it is.

`--workers`: read by a DataLoader with workers; `--slow STEP`: rank 0 evaluates for 1.5 s after that step;
`--first`: the first step takes 1.5 s; `--style loop`: `preemption.check()` in a loop of its own, no Run;
`--without RANK`: that rank never calls it; `--save SECONDS`: gathering the state takes that long; `--behind`: what
is saved takes a while to write, and once it is being written in the background, rank 0 gets SIGTERM; `--deep`: a model
of several layers; `--rewrap STEP`: wrapped anew before that step.
"""

import argparse
import gc
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import heartbeat, preemption, start_run

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--slow", type=int)
parser.add_argument("--first", action="store_true")
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--style", default="run")
parser.add_argument("--without", type=int)
parser.add_argument("--save", type=float, default=0.0)
parser.add_argument("--behind", action="store_true")
parser.add_argument("--deep", action="store_true")
parser.add_argument("--rewrap", type=int)
parser.add_argument("--on-preempt", default="raise")
args = parser.parse_args()

rank = int(os.environ["RANK"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


class Numbers(torch.utils.data.Dataset):
    """Items that follow from their index alone."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            tell(f"worker-{os.getpid()}", os.getpid())
        return torch.full((4,), index % 17 / 17.0)


class SlowToSave:
    """State that takes a while to gather."""

    def state_dict(self):
        if (told / f"step-{rank}").exists():  # not when it is only looked at, before the first step
            tell(f"saves-{rank}", os.getpid())
            time.sleep(args.save)
        return {"n": 1}

    def load_state_dict(self, state):
        assert state == {"n": 1}


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
tell(f"rank-{rank}", os.getpid())

if args.style == "loop":
    step = 0
    while step < args.steps:
        with heartbeat():
            time.sleep(args.pause)
            dist.all_reduce(torch.ones(1))
        step += 1
        tell(f"step-{rank}", step)
        if rank != args.without and preemption.check():
            tell(f"left-{rank}", f"{step} {preemption.time_left()}")
            preemption.exit()
    raise SystemExit(0)

net = torch.nn.Linear(4, 1)
if args.deep:
    net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=args.workers)
losses = (told / f"losses-{rank}").open("a", buffering=1)
state = {"model": net, "optimizer": optimizer}
if args.save:
    state["slow"] = SlowToSave()
if args.behind:
    state["ballast"] = torch.zeros(16_000_000)
with start_run(state=state, checkpoint_async=args.behind) as run:
    for step, batch in run.steps(loader, max_steps=args.steps, on_preempt=args.on_preempt):
        if step == args.rewrap:
            del model  # and with it the hooks that it has put on the parameters
            gc.collect()
            model = DistributedDataParallel(net)
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.write(f"{step} {loss.item().hex()}\n")
        tell(f"step-{rank}", step + 1)
        time.sleep(1.5 if args.first and step == 0 else args.pause)
        if args.behind and rank == 0 and not (told / "behind").exists() and not run.checkpointer.wait(0.0):
            os.kill(os.getpid(), signal.SIGTERM)
            tell("behind", time.time())
        if step == args.slow and rank == 0:
            tell("evaluates", step)
            time.sleep(1.5)
