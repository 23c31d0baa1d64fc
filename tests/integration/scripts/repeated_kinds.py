"""What the scripts of repeated steps share: the data, the model, and what a resume finds other, by `sys.argv[1]`."""

import os
import random
import sys
import time

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

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
    if KIND == "any order":
        return DataLoader(Augmented(ROWS[:32]), 4, shuffle=True, num_workers=2, in_order=False)
    return DataLoader(rows, 2 if KIND == "batch size" and IS_AGAIN else 4, shuffle=True)


def plant(step):
    """Do in this step what makes it another one than before."""
    if KIND == "seeded" and step in (5, 6):
        torch.manual_seed(time.time_ns() % 1000)
    if KIND == "python" and step in (5, 6):
        random.seed()
    if KIND == "more draws" and IS_AGAIN:
        torch.rand(1)


torch.manual_seed(3)
random.seed(3)
