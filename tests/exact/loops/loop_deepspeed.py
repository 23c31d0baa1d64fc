"""A loop with DeepSpeed's ZeRO, as docs/adapters/deepspeed.md writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "integration" / "scripts"))
import telling as t
import torch
import torch.distributed as dist
from cpu_deepspeed import deepspeed
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters import deepspeed as resilience

o = t.options
deepspeed.init_distributed("gloo")
net = t.same_net()
inner = t.optimizer_of(net)
engine, *_ = deepspeed.initialize(
    model=net,
    optimizer=inner,
    lr_scheduler=t.schedule_of(inner),
    config={
        "train_micro_batch_size_per_gpu": t.BATCH,
        "gradient_accumulation_steps": t.ACCUMULATE,
        "zero_optimization": {"stage": o["stage"]},
        "zero_allow_untested_optimizer": True,
    },
)
data, sampler = t.Noisy(), None
make = StatefulDataLoader if "stateful" in o["loader"] else DataLoader
if o["loader"] == "stateful stream":
    loader: Any = StatefulDataLoader(t.StatefulStream(), t.BATCH)
elif t.ranks > 1:
    sampler = DistributedSampler(data, t.ranks, t.rank)
    loader = make(data, t.BATCH, sampler=sampler)
else:
    loader = make(data, t.BATCH, shuffle=True)
micro, at = 0, -1


def train_step(epoch: int, batch: torch.Tensor) -> None:
    """Make one of a micro-batch."""
    global micro, at
    step = handle.step
    micro, at = (micro + 1, at) if step == at else (0, step)
    number = step * t.ACCUMULATE + micro
    t.at_step(step)
    if micro == 1:
        t.reach("window", step)
    t.tell("epoch", step, epoch)
    t.tell_batch(number, batch)
    loss = nn.functional.mse_loss(engine(batch), batch.mean(1, keepdim=True) / 5)
    engine.backward(loss)
    engine.step()
    t.tell("losses", number, loss.item())
    t.tell("learning rates", number, t.rate_of(inner))
    t.tell_generators(number)
    if o["stage"] < 3:
        t.tell("weights", number, t.digest(list(net.parameters())))


def evaluate(epoch: int) -> None:
    """Evaluate, with random numbers."""
    engine.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for index, batch in enumerate(DataLoader(t.Noisy(12, 200), 4)):
            if index == 1:
                t.reach("evaluation", epoch)
            total += engine(batch).mean()
    engine.train()
    t.tell("evaluations", epoch, total.item())


t.seed()
with resilience.attach(engine, loader=loader, checkpoint_every=t.EVERY) as handle:
    for epoch in range(handle.epoch, t.EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            train_step(epoch, batch)
        evaluate(epoch)
        t.tell_generators(f"epoch {epoch}")
        t.reach("behind", epoch)
with deepspeed.zero.GatheredParameters(list(net.parameters())):
    t.tell("end", "draw", [torch.rand(()).item(), t.digest(list(net.parameters()))])
dist.destroy_process_group()
