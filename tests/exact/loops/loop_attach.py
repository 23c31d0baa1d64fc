"""A loop of one's own with `attach` and a `Checkpointer`, as docs/adapters/pytorch.md writes it."""

from __future__ import annotations

import collections
from typing import Any

import numpy
import telling as t
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import resilience_sdk
from resilience_sdk.adapters import pytorch
from resilience_sdk.checkpoint import Checkpointer

o = t.options
if t.ranks > 1:
    dist.init_process_group("gloo")
net = t.same_net()
model: nn.Module = net
if t.ranks > 1:
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=not o.get("norm"))
optimizer = t.optimizer_of(net)
schedule = t.schedule_of(optimizer)
average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
own = torch.Generator().manual_seed(7 + t.rank)
replay: collections.deque[Any] = collections.deque(maxlen=5)
seen, mean = numpy.zeros(64), torch.zeros(())


def loader_of(kind: str) -> Any:
    """Return the loader."""
    if kind == "stateful stream":
        return StatefulDataLoader(t.StatefulStream(), t.BATCH)
    data, workers = t.Noisy(), 2 if "workers" in kind else 0
    make = StatefulDataLoader if "stateful" in kind else DataLoader
    if t.ranks > 1:
        return make(data, t.BATCH, sampler=DistributedSampler(data, t.ranks, t.rank), num_workers=workers)
    if "sampler" in kind:
        return make(data, t.BATCH, sampler=RandomSampler(data), num_workers=workers)
    return make(data, t.BATCH, shuffle=True, num_workers=workers)


loader = loader_of(o["loader"])
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "average": average}
state |= {"own": own, "replay": replay, "seen": seen, "mean": mean}
saver = Checkpointer(state, every=t.EVERY)
if o.get("added"):
    saver.add_data("loader", loader)
saver.resume()
batches = saver.values.get("batches", 0)
handle = pytorch.attach(model, optimizer, loader, first_step=batches // t.ACCUMULATE)


def train_step(epoch: int, batch: torch.Tensor) -> None:
    """Make one."""
    global batches
    number = batches
    t.at_step(number)
    t.tell("epoch", number, epoch)
    t.tell_batch(number, batch)
    noise = torch.rand((), generator=own)
    loss = t.loss_of(model, batch) * (1 + noise)
    loss.backward()
    if number % t.ACCUMULATE == t.ACCUMULATE - 1:
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        if o.get("schedule") == "step":
            schedule.step()
    mean.mul_(0.9).add_(loss.detach() * 0.1)
    replay.append((number, batch.numpy(), loss.detach()))
    seen[[round(one) % 64 for one in batch[:, 0].tolist()]] += 1
    t.tell("losses", number, loss.item())
    t.tell("learning rates", number, t.rate_of(optimizer))
    t.tell_generators(number, own=own)
    t.tell("weights", number, t.digest(list(net.parameters())))
    t.tell("buffers of each rank", number, t.digest(dict(net.named_buffers())))
    t.tell("averages", number, [t.digest(average.state_dict()), mean.item()])
    t.tell("optimizer and scaler", number, t.digest(optimizer.state_dict()["state"]))
    t.tell("objects in state", number, [t.digest(list(replay)), t.digest(seen)])
    batches += 1
    saver.values["batches"] = batches
    saver.maybe_save(batches)


try:
    for epoch in range(saver.values.get("epoch", 0), t.EPOCHS):
        saver.values["epoch"] = epoch
        for batch in loader:
            train_step(epoch, batch)
        t.evaluate(epoch, model, net)
        if o.get("schedule") != "step":
            schedule.step()
        t.tell_generators(f"epoch {epoch}", own=own)
        t.reach("behind", epoch)
except resilience_sdk.Preempted:
    saver.save(batches)
    raise
handle.detach()
saver.save(batches)
t.tell("end", "draw", [torch.rand(()).item(), numpy.random.rand(), torch.rand((), generator=own).item()])
if t.ranks > 1:
    dist.destroy_process_group()
