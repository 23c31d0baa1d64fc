"""One rank that shuffles, draws and lowers its learning rate: `repeated.py KIND`, which says what a resume finds other.

`good`: nothing; `order`: a sampler with a generator of its own; `rate`: a scheduler that is not in the state; `seeded`:
a program that seeds anew behind the resume; `forgets`: a state that does not take back what it gave.
"""

import random
import sys
import time

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import resilience_sdk

KIND = sys.argv[1]


class Own(Sampler):
    """Another order in each process."""

    def __iter__(self):
        return iter(random.Random(time.time_ns()).sample(range(32), 32))

    def __len__(self):
        return 32


class Mean:
    """A mean of losses."""

    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = 0.0 if KIND == "forgets" else state["value"]


torch.manual_seed(3)
data = TensorDataset(torch.rand(32, 2))
loader = DataLoader(data, batch_size=4, sampler=Own()) if KIND == "order" else DataLoader(data, 4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
mean = Mean()
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "mean": mean}
if KIND == "rate":
    del state["scheduler"]
with resilience_sdk.start_run(state=state, checkpoint_every=5) as run:
    for step, (batch,) in run.steps(loader, epochs=2):
        if KIND == "seeded" and step in (5, 6):  # as a framework that seeds at its start
            torch.manual_seed(time.time_ns() % 1000)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean.value += loss.item()
