"""A loop of one's own under `start_run`, as docs/checkpoints.md writes it."""

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

o = t.options
if t.ranks > 1:
    dist.init_process_group("gloo")
net = t.same_net()
model: nn.Module = net
if t.ranks > 1:
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=not o.get("norm"))
optimizer = t.optimizer_of(net)
schedule = t.schedule_of(optimizer)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=bool(o.get("scaler")))
average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
own = torch.Generator().manual_seed(7 + t.rank)
replay: collections.deque[Any] = collections.deque(maxlen=5)
seen, mean = numpy.zeros(64), torch.zeros(())


def loader_of(kind: str) -> Any:
    """Return the loader."""
    if kind == "stream":
        return DataLoader(t.Stream(), t.BATCH)
    if kind == "stateful stream":
        return StatefulDataLoader(t.StatefulStream(), t.BATCH)
    data, workers = t.Noisy(), 2 if "workers" in kind else 0
    make = StatefulDataLoader if "stateful" in kind else DataLoader
    if "own order" in kind:
        return make(data, t.BATCH, sampler=t.OwnOrder())
    if t.ranks > 1 or "distributed" in kind:
        return make(data, t.BATCH, sampler=DistributedSampler(data, t.ranks, t.rank), num_workers=workers)
    return make(data, t.BATCH, shuffle=True, num_workers=workers)


loader = loader_of(o["loader"])
second = StatefulDataLoader(t.Noisy(20, 100), 2, sampler=RandomSampler(range(20))) if o.get("second") else None
others = iter(())
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "average": average}
state |= {"own": own, "replay": replay, "seen": seen, "mean": mean}
if second is not None:
    state["second"] = second


def next_other() -> torch.Tensor:
    """Return the next batch of the second loader, round and round."""
    global others
    batch = next(others, None)
    if batch is None:
        others = iter(second)
        batch = next(others)
    return batch


def train_step(step: int, batch: torch.Tensor) -> None:
    """Make one."""
    t.at_step(step)
    t.tell("epoch", step, run.epoch)
    t.tell_batch(step, batch)
    if second is not None:
        other = next_other()
        t.tell_batch(step, other, "samples of a second loader")
        batch = torch.cat([batch, other])
    noise = torch.rand((), generator=own)
    loss = t.loss_of(model, batch) * (1 + noise)
    scaler.scale(loss).backward()
    if step % t.ACCUMULATE == t.ACCUMULATE - 1:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(net)
        if o.get("schedule") == "step":
            schedule.step()
    mean.mul_(0.9).add_(loss.detach() * 0.1)
    replay.append((step, batch.numpy(), loss.detach()))
    seen[[round(number) % 64 for number in batch[:, 0].tolist()]] += 1
    run.values["greatest"] = max(run.values.get("greatest", 0.0), loss.item())
    t.tell("losses", step, loss.item())
    t.tell("learning rates", step, t.rate_of(optimizer))
    t.tell_generators(step, own=own)
    t.tell("weights", step, t.digest(list(net.parameters())))
    t.tell("buffers of each rank", step, t.digest(dict(net.named_buffers())))
    t.tell("averages", step, [t.digest(average.state_dict()), mean.item()])
    t.tell("optimizer and scaler", step, t.digest([optimizer.state_dict()["state"], scaler.state_dict()]))
    t.tell("objects in state", step, [t.digest(list(replay)), t.digest(seen), run.values["greatest"]])
    if step % 2:
        t.tell("log records", step, mean.item())


with resilience_sdk.start_run(state=state, checkpoint_every=t.EVERY) as run:
    if o["form"] == "steps":
        for step, batch in run.steps(loader, epochs=t.EPOCHS):
            train_step(step, batch)
    else:
        for epoch in run.epochs(t.EPOCHS):
            for step, batch in run.steps(loader):
                train_step(step, batch)
            value = t.evaluate(epoch, model, net)
            if o.get("schedule") == "metric":
                schedule.step(value)
            elif o.get("schedule") == "epoch":
                schedule.step()
            run.values["best"] = min(run.values.get("best", 1e9), value)
            t.tell("best markers", epoch, run.values["best"])
            t.tell_generators(f"epoch {epoch}", own=own)
            t.reach("behind", epoch)
    t.tell("end", "draw", [torch.rand(()).item(), numpy.random.rand(), torch.rand((), generator=own).item()])
if t.ranks > 1:
    dist.destroy_process_group()
