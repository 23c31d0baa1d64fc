"""One rank that shuffles, draws and lowers its learning rate: `repeated.py KIND`, which a resume finds other."""

import os
import random
import sys
import time

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

import resilience_sdk

KIND = sys.argv[1]
IS_AGAIN = os.environ["RESILIENCE_INTERNAL_ATTEMPT"] != "0"
ROWS = torch.rand(64, 2, generator=torch.Generator().manual_seed(8))


class Own(Sampler):
    """Another order in each process; of `batch` the sixth to eighth batch alone."""

    def __iter__(self):
        order = list(range(32))
        if KIND == "order":
            random.Random(time.time_ns()).shuffle(order)
        elif IS_AGAIN:
            order[24:28] = reversed(order[24:28])
        return iter(order)

    def __len__(self):
        return 32


class Augmented(TensorDataset):
    """Other values each time, on purpose."""

    def __getitem__(self, index):
        return (super().__getitem__(index)[0] + random.SystemRandom().random(),)


class Stream(IterableDataset):
    """Rows that nobody can ask for again."""

    def __iter__(self):
        return iter([(torch.tensor([random.SystemRandom().random()] * 2),) for _ in range(32)])


class Mean:
    """A mean of losses, which may not come back."""

    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = 0.0 if KIND == "forgets" else state["value"]


class Model(torch.nn.Sequential):
    """A model that may be made anew by its load."""

    def load_state_dict(self, state, *args, **options):
        found = super().load_state_dict(state, *args, **options)
        if KIND == "weights":
            torch.nn.init.ones_(self[0].weight)
        return found


def make_loader():
    rows = TensorDataset(ROWS[:32])
    if KIND in ("order", "batch"):
        return DataLoader(rows, batch_size=4, sampler=Own())
    if KIND == "shard":
        return DataLoader(TensorDataset(ROWS), 4, sampler=DistributedSampler(ROWS, 2, rank=int(IS_AGAIN)))
    if KIND == "augmented":
        return DataLoader(Augmented(ROWS[:32]), 4, shuffle=True)
    if KIND == "stream":
        return DataLoader(Stream(), 4)
    return DataLoader(rows, 2 if KIND == "batch size" and IS_AGAIN else 4, shuffle=True)


torch.manual_seed(3)
random.seed(3)
loader = make_loader()
model = Model(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
mean, factor = Mean(), 1.0
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "mean": mean, "scaler": scaler}
if KIND == "rate":
    del state["scheduler"]
with resilience_sdk.start_run(state=state, checkpoint_every=5) as run:
    if KIND == "own rate" and IS_AGAIN:
        scheduler.base_lrs = [1.0]
        optimizer.param_groups[0]["lr"] = 1.0
    for step, (batch,) in run.steps(loader, epochs=2):
        if KIND == "seeded" and step in (5, 6):
            torch.manual_seed(time.time_ns() % 1000)
        if KIND == "python" and step in (5, 6):
            random.seed()
        if KIND == "more draws" and IS_AGAIN:
            torch.rand(1)
        optimizer.zero_grad()
        loss = model(batch).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        mean.value += loss.item()
        factor = 1.0 + 0.1 * step  # which the state does not hold
        resilience_sdk.numerics.check(loss=loss)
