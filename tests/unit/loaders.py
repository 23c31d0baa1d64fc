"""Loaders of five samples that tests resume: augmented at random, and one that knows its place."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

SAMPLES = 5


class Augmented(Dataset):
    """Items from which each reading draws another number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index + torch.rand(()).item()


class Stateful:
    """A loader that knows its place, and draws its order at its first batch."""

    def __init__(self):
        self.order, self.next = None, 0

    def __iter__(self):
        if self.order is None:
            self.order, self.next = torch.randperm(SAMPLES), 0
        while self.next < SAMPLES:
            self.next += 1
            yield self.order[self.next - 1] + torch.rand(())
        self.order = None

    def state_dict(self):
        return {"order": self.order, "next": self.next}

    def load_state_dict(self, saved):
        self.order, self.next = saved["order"], saved["next"]
