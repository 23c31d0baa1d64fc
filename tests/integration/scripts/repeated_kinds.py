"""What the scripts of repeated steps share: data, model, and what a resume finds other, by `sys.argv[1]`.

With several ranks it is the last one that finds it so.
"""

import os
import random
import sys
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

KIND = sys.argv[1]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_HERE = RANK == RANKS - 1
# A loss counts where an earlier resume had equal ones.
OF_LOSS = ("dropout rate", "late weights", "unsaved")
IS_AGAIN = IS_HERE and int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"]) == 1 + (KIND in OF_LOSS)
PER_STEP = {"accumulated": 2, "accumulation": 1 + IS_AGAIN}.get(KIND, 1)
FACTOR = 1.1 if KIND in ("unsaved", "untrusted") and IS_AGAIN else 1.0
"""Of the loss, which no state holds."""
TOTAL = 64 if KIND == "longer" and IS_AGAIN else 32
EACH = 32
"""Samples of a rank, in batches of 4."""
ROWS = torch.rand(2 * EACH * RANKS, 2, generator=torch.Generator().manual_seed(8))


class Own(Sampler):
    """Another order in each process; of `batch` the seventh batch of the rank alone."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        order = list(range(self.length))
        if KIND == "order":
            random.Random(time.time_ns() if IS_HERE else 1).shuffle(order)
        elif IS_AGAIN:
            at = 4 * (6 if self.length == EACH else 6 * RANKS + RANK)  # a framework takes the share of each rank
            order[at : at + 4] = reversed(order[at : at + 4])
        return iter(order)

    def __len__(self):
        return self.length


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


def restored(net):
    """Be a model whose load has taken a state: some make it anew."""
    if KIND == "weights" and IS_HERE:
        torch.nn.init.ones_(net[0].weight)
    if KIND == "buffers" and IS_HERE:
        net[1].reset_running_stats()


class Model(torch.nn.Sequential):
    """A model with all that is restored, or not."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))

    def load_state_dict(self, state, *args, **options):
        found = super().load_state_dict(state, *args, **options)
        restored(self)
        return found


class Optimizer(torch.optim.SGD):
    """One with a momentum, which may not come back, as an option of it."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.5, weight_decay=0.1)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if KIND == "momentum" and IS_AGAIN:
            self.state.clear()
        if KIND == "options" and IS_AGAIN:  # some load at the start of each attempt
            self.param_groups[0]["weight_decay"] = 0.0


def rate(step):
    """Return the factor of the learning rate; of `longer` for the length of the training."""
    return 1 - step / TOTAL if KIND == "longer" else 0.9**step


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    """One that may count anew."""

    def __init__(self, optimizer):
        super().__init__(optimizer, rate)

    def load_state_dict(self, state):
        super().load_state_dict({**state, "last_epoch": 0} if KIND == "scheduler" and IS_HERE else state)


class Scaler(torch.amp.GradScaler):
    """One whose scale may begin anew."""

    def __init__(self):
        super().__init__("cpu", init_scale=2.0, growth_interval=2)

    def load_state_dict(self, state):
        if KIND != "scaler" or not IS_HERE:
            super().load_state_dict(state)


def make_loader(*, is_shared=False):
    """Return the loader; `is_shared`: the framework takes each rank's share."""
    length = EACH * RANKS if is_shared else EACH
    rows = ROWS[:length] if is_shared else ROWS[RANK * EACH :][:EACH]
    if KIND in ("order", "batch"):
        return DataLoader(TensorDataset(rows), 4, sampler=Own(length))
    if KIND == "shard":
        shares = 2 if is_shared else 2 * RANKS
        share = (0 if is_shared else 2 * RANK) + IS_AGAIN
        return DataLoader(TensorDataset(ROWS), 4, sampler=DistributedSampler(ROWS, shares, rank=share))
    if KIND == "stream":
        return DataLoader(Stream(), 4)
    if KIND in ("augmented", "any order"):
        workers = {"num_workers": 2, "in_order": False} if KIND == "any order" else {}
        return DataLoader(Augmented(rows), 4, shuffle=True, **workers)
    size = 2 if KIND == "batch size" and IS_AGAIN else 4
    if RANKS > 1 and not is_shared:
        all_rows = ROWS[: EACH * RANKS]
        return DataLoader(TensorDataset(all_rows), size, sampler=DistributedSampler(all_rows, RANKS, rank=RANK))
    return DataLoader(TensorDataset(rows), size, shuffle=True)


is_late = True


def plant(step, net):
    """Do in this step what makes it another one than before."""
    global is_late
    if IS_HERE and step in (5, 6):
        if KIND == "seeded":
            torch.manual_seed(time.time_ns() % 1000)
        if KIND == "python":
            random.seed()
        if KIND == "numpy":
            np.random.seed()
    if not IS_AGAIN:
        return
    if KIND == "more draws":
        torch.rand(1)
    if KIND in ("dropout", "dropout rate"):
        net[2].p = 0.0 if KIND == "dropout" else 0.4
    if KIND == "late weights" and is_late:
        is_late = False
        with torch.no_grad():
            net[0].weight.mul_(1.01)


def set_own_rate(optimizer, scheduler):
    """Set another learning rate at the resume, where that is asked for: it is no difference."""
    if KIND == "own rate" and IS_AGAIN:
        scheduler.base_lrs = [1.0] * len(scheduler.base_lrs)
        for group in optimizer.param_groups:
            group["lr"] = 1.0


torch.manual_seed(3)
random.seed(3)
np.random.seed(3)
