"""A loop on DeepSpeed as its documentation writes it, trained without the SDK, and then again with it, to be cut short.

Each micro-batch, and what follows the batches of an epoch, leaves a line that tells all of it: samples, loss, learning
rate, weights, buffers of this rank, generators and objects of the script's own. `OUT.RANK` has those without the SDK,
`OUT.sdk.RANK` those with it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cpu_deepspeed import deepspeed
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from resilience_sdk.adapters import deepspeed as resilience

SAMPLES, BATCH, WINDOW, EPOCHS = 24, 2, 2, 4

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--loader", default="torch", choices=("torch", "random", "own", "repeated", "own-repeated"))
parser.add_argument("--every", type=int, default=3)
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=WINDOW)
parser.add_argument("--batch", type=int, default=BATCH)
parser.add_argument("--slow-from", type=int, default=1 << 30, help="at this step steps begin to take their time")
parser.add_argument("--control", action="store_true", help="train without the SDK alone")
parser.add_argument("--killed-behind", type=int, help="the batches of this epoch, before what follows them")
parser.add_argument("--saves-in-window", type=int, help="save() in this step, behind its first micro-batch, and die")
parser.add_argument("--untold", action="store_true", help="attach() is given no loader")
args = parser.parse_args()
rank = int(os.environ["RANK"])


class Augmented(Dataset):
    """Numbers, to which each reading adds another one."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class Epochs:
    """An object of the script's own with a state."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        """Return it."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it."""
        self.count = state["count"]


def made() -> tuple[Any, Any]:
    """Return an engine and the loader of its training."""
    torch.manual_seed(0)
    random.seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    is_own = args.loader.startswith("own")
    engine, _, own, _ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.05),
        training_data=Augmented() if is_own else None,
        config={
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_accumulation_steps": args.accumulate,
            "zero_optimization": {"stage": args.stage},
            "zero_allow_untested_optimizer": True,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 20},
            },
        },
    )
    if is_own:
        own.num_local_io_workers = 0
        return engine, own
    torch.manual_seed(rank)
    data = Augmented()
    is_random = args.loader in ("random", "repeated")
    sampler = RandomSampler(data, num_samples=SAMPLES // 2) if is_random else DistributedSampler(data)
    return engine, DataLoader(data, args.batch, sampler=sampler, drop_last=True)


def train(out: str, attach: Any) -> None:
    """Train for all epochs, over all starts."""
    engine, loader = made()
    ema, epochs, replay = nn.Linear(4, 1), Epochs(), collections.deque(maxlen=5)
    for parameter in ema.parameters():
        nn.init.zeros_(parameter)  # as on each rank
    file = open(f"{out}.{rank}", "a", buffering=1)  # noqa: SIM115 - as long as the process is there

    def tell(key: str, *facts: Any) -> None:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            parts = {
                "facts": facts[1:],
                "rate": engine.get_lr(),
                "weights": list(engine.module.parameters()),
                "buffers": list(engine.module.buffers()),
                "state": (list(ema.parameters()), epochs.count, replay, handle.values),
                "generators": (torch.get_rng_state().sum(), random.getstate()),
            }
        told = {name: hashlib.sha1(repr(part).encode()).hexdigest()[:8] for name, part in parts.items()}
        print(key, json.dumps({"samples": facts[0], **told}), file=file)

    def micro_step(batch: torch.Tensor) -> None:
        step, is_first = engine.global_steps, engine.micro_steps % args.accumulate == 0
        time.sleep(0.2 * (step >= args.slow_from))  # a stop is agreed some steps ahead
        loss = engine(batch[:, None]).square().mean()
        engine.backward(loss)
        if is_first and attempt == 0 and step == args.saves_in_window and handle.save():
            engine.step()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        with torch.no_grad():
            for mine in ema.parameters():
                mine.mul_(0.5).add_(step)
        replay.append((step, float(loss)))
        handle.values["seen"] = handle.values.get("seen", 0) + 1
        tell(f"{step}.{0 if is_first else 1}", batch.long().tolist(), loss.item())

    def behind(epoch: int) -> None:
        if epoch == args.killed_behind and isinstance(handle, resilience.Attached) and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        epochs.count += 1
        tell(f"behind-{epoch}", torch.rand(3).tolist())

    repeating = deepspeed.utils.RepeatingLoader(loader) if args.loader.endswith("repeated") else None
    state = {"ema": ema, "epochs": epochs, "replay": replay}
    with attach(engine, loader=None if args.untold else repeating or loader, state=state) as handle:
        if repeating is not None:
            per_epoch = SAMPLES // 2 // args.batch
            while engine.global_steps < EPOCHS * per_epoch // args.accumulate:
                micro_step(next(repeating))
        for epoch in range(handle.epoch, EPOCHS if repeating is None else 0):
            if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for batch in loader:
                micro_step(batch)
            behind(epoch)


@contextlib.contextmanager
def alone(_engine: Any, **_options: Any) -> Any:
    """Stand for the handle where there is none."""
    yield SimpleNamespace(epoch=0, values={}, save=lambda: False)


def attached(engine: Any, **options: Any) -> Any:
    """Return the handle."""
    return resilience.attach(engine, checkpoint_every=args.every, **options)


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
torch.set_printoptions(precision=17, threshold=1 << 20)  # to the last bit
deepspeed.init_distributed("gloo")
attempt = int(os.environ.get("RESILIENCE_INTERNAL_ATTEMPT", "0"))
if not Path(f"{args.out}.done").exists():
    train(args.out, alone)
    dist.barrier()
    Path(f"{args.out}.done").touch()
if not args.control:
    train(f"{args.out}.sdk", attached)
dist.destroy_process_group()
