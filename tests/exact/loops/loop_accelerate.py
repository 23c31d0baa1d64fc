"""A loop with Accelerate, as docs/adapters/accelerate.md writes it; alone with its `save_state`."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import telling as t
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

o = t.options


class Average:
    """An average of losses, which is registered."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        """Return it."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take it."""
        self.value = state["value"]


accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=t.ACCUMULATE, dataloader_config=DataLoaderConfiguration(**o["config"])
)
net = t.same_net()
inner = t.optimizer_of(net)
data = t.StatefulStream() if o["loader"] == "stateful stream" else t.Stream() if o["loader"] == "stream" else t.Noisy()
shuffle = {"shuffle": True} if "map" in o["loader"] else {}
workers = 2 if "workers" in o["loader"] else 0
model, optimizer, loader, schedule = accelerator.prepare(
    net, inner, DataLoader(data, t.BATCH, num_workers=workers, **shuffle), t.schedule_of(inner)
)
average = Average()
accelerator.register_for_checkpointing(average)
micro_batches = t.MicroBatches()


def train_step(epoch: int, batch: torch.Tensor) -> None:
    """Make one of a micro-batch."""
    number = micro_batches.begin(handle.step, epoch, batch)
    with accelerator.accumulate(model):
        loss = t.loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        if o.get("schedule") == "step":
            schedule.step()
        optimizer.zero_grad()
    average.value = 0.9 * average.value + 0.1 * loss.item()
    t.tell("losses", number, loss.item())
    t.tell("learning rates", number, t.rate_of(inner))
    t.tell_generators(number)
    t.tell("weights", number, t.digest(list(net.parameters())))
    t.tell("averages", number, average.value)
    t.tell("optimizer and scaler", number, t.digest(inner.state_dict()["state"]))


def train(first: int, rest: Any) -> None:
    """Train from that epoch on, of which `rest` is left."""
    for epoch in range(first, t.EPOCHS):
        for index, batch in enumerate(rest if epoch == first else loader):
            train_step(epoch, batch)
            if t.alone and accelerator.sync_gradients:
                handle.step += 1
                if handle.step % t.EVERY == 0:
                    keep(epoch, index + 1 + (skipped if epoch == first else 0))
        t.evaluate(epoch, model, net)
        if o.get("schedule") != "step":
            schedule.step()
        t.tell_generators(f"epoch {epoch}")
        t.reach("behind", epoch)


def keep(epoch: int, batches: int) -> None:
    """Save by Accelerate's own means."""
    place = Path(o["scratch"]) / f"kept-{handle.step:03}"
    accelerator.save_state(str(place))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (place / "place.json").write_text(json.dumps([handle.step, epoch, batches]))


t.seed()
skipped = 0
if t.alone:
    handle: Any = types.SimpleNamespace(step=0)
    kept = sorted(path.parent for path in Path(o["scratch"]).glob("kept-*/place.json"))
    if kept:
        accelerator.load_state(str(kept[-1]))
        handle.step, first, skipped = json.loads((kept[-1] / "place.json").read_text())
        train(first, accelerator.skip_first_batches(loader, skipped))
    else:
        train(0, loader)
else:
    from resilience_sdk.adapters import accelerate as resilience

    with resilience.attach(accelerator, checkpoint_every=t.EVERY) as handle:
        train(handle.epoch, loader)
t.tell("end", "draw", [torch.rand(()).item(), t.digest(net.state_dict())])
accelerator.end_training()
