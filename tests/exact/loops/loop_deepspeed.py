"""A loop on DeepSpeed, as docs/adapters/deepspeed.md writes it; alone with its `save_checkpoint`."""

from __future__ import annotations

import collections
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import telling as t
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "integration/scripts"))
from cpu_deepspeed import deepspeed

o = t.options
deepspeed.init_distributed("gloo")
net = t.same_net()
engine, _, _, schedule = deepspeed.initialize(
    model=net,
    optimizer=t.optimizer_of(net),
    config={
        "train_micro_batch_size_per_gpu": t.BATCH,
        "gradient_accumulation_steps": t.ACCUMULATE,
        "zero_optimization": {"stage": o["stage"]},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 20}},
    },
)
t.seed()
ema, replay = torch.zeros(()), collections.deque[Any](maxlen=5)
micro_batches = t.MicroBatches()


def loader_of(kind: str) -> Any:
    """Return the loader."""
    data, workers = t.Noisy(), 2 if "workers" in kind else 0
    make = StatefulDataLoader if "stateful" in kind else DataLoader
    if "distributed" in kind:
        return make(data, t.BATCH, sampler=DistributedSampler(data, t.ranks, t.rank), num_workers=workers)
    return make(data, t.BATCH, shuffle=True, num_workers=workers)


loader = loader_of(o["loader"])
if "repeated" in o["loader"]:
    loader = deepspeed.utils.RepeatingLoader(loader)


def whole(tensors: Any) -> Any:
    """Return a context in which parameters that are spread over the ranks are whole."""
    return deepspeed.zero.GatheredParameters(list(tensors))


def train_step(epoch: int, batch: torch.Tensor) -> None:
    """Make one of a micro-batch."""
    number = micro_batches.begin(engine.global_steps, epoch, batch)
    loss = t.loss_of(engine, batch)
    engine.backward(loss)
    engine.step()
    ema.mul_(0.9).add_(loss.detach() * 0.1)
    replay.append((number, loss.item()))
    t.tell("losses", number, loss.item())
    t.tell("learning rates", number, engine.get_lr())
    t.tell_generators(number)
    with whole(net.parameters()):
        t.tell("weights", number, t.digest([one.detach().clone() for one in net.parameters()]))
    t.tell("buffers of each rank", number, t.digest(dict(net.named_buffers())))
    t.tell("averages", number, ema.item())
    t.tell("objects in state", number, t.digest(list(replay)))


def train(first: int, skipped: int = 0) -> None:
    """Train from that epoch on, of which so many batches are done."""
    if "repeated" in o["loader"]:
        while (done := engine.global_steps * t.ACCUMULATE) < 6 * t.EPOCHS:
            for _ in range(t.ACCUMULATE):
                train_step(done // 6, next(loader))
            if (done + t.ACCUMULATE) % 6 == 0:
                t.evaluate(done // 6, engine, engine)
                t.reach("behind", done // 6)
        return
    for epoch in range(first, t.EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        batches = itertools.islice(loader, skipped, None) if skipped else loader
        for index, batch in enumerate(batches, skipped):
            train_step(epoch, batch)
            if t.alone and (index + 1) % t.ACCUMULATE == 0 and engine.global_steps % t.EVERY == 0:
                engine.save_checkpoint(f"{o['scratch']}/kept", client_state={"place": (epoch, index + 1)})
        skipped = 0
        t.evaluate(epoch, engine, engine)
        t.tell_generators(f"epoch {epoch}")
        t.reach("behind", epoch)


handle: Any = types.SimpleNamespace(epoch=0)
if t.alone:
    found, state = engine.load_checkpoint(f"{o['scratch']}/kept")
    train(*(state["place"] if found else (0, 0)))
else:
    from resilience_sdk.adapters import deepspeed as resilience

    own = {"ema": ema, "replay": replay}
    with resilience.attach(engine, loader=loader, checkpoint_every=t.EVERY, state=own) as handle:
        train(handle.epoch)
with whole(net.parameters()):
    weights = t.digest([one.detach().clone() for one in net.parameters()])
t.tell("end", "draw", [torch.rand(()).item(), weights])
torch.distributed.destroy_process_group()
