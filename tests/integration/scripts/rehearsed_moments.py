"""A training that comes to every moment: epochs, gradients of two batches added up, evaluations, dropout, saves.

The first argument is what it forgets at a resume, by what is compared:

order      the order of the samples is drawn from a generator that nobody saves
rate       the scheduler begins anew
momentum   that of the optimizer does
dropout    rank 1 draws other numbers
unseeded   nothing: two undisturbed runs have other numbers, too
"""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resilience_sdk import heartbeat, preemption
from resilience_sdk.straggler import section

FORGETS = sys.argv[1] if len(sys.argv) > 1 else ""
EPOCHS, BATCHES, EVERY, FILE = 3, 16, 8, "state-{}.pt"


class Order(DistributedSampler):
    """The order of an epoch, from a generator of its own."""

    own = torch.Generator().manual_seed(5)

    def __iter__(self):
        self.seed = int(torch.randint(1000, (1,), generator=self.own)) if FORGETS == "order" else 0
        return super().__iter__()


def drops_other(rank: int) -> bool:
    return FORGETS == "dropout" and rank == 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(random.SystemRandom().randrange(1 << 30) if FORGETS == "unseeded" else 0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    inputs = torch.randn(BATCHES * 8, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    order = Order(data)
    loader = DataLoader(data, batch_size=4, sampler=order)
    done, file, rng = 0, FILE.format(rank), None
    if os.path.exists(file):
        state = torch.load(file, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if FORGETS == "momentum":
            optimizer.state.clear()
        if FORGETS != "rate":
            scheduler.load_state_dict(state["scheduler"])
        done, rng = state["done"], state["rng"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        torch.save({**state, "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}, f"{file}.tmp")
        dist.barrier()  # none is renamed where another one is torn
        os.replace(f"{file}.tmp", file)

    for epoch in range(done // BATCHES, EPOCHS):
        order.set_epoch(epoch)
        for number, (batch, target) in enumerate(loader):
            if epoch * BATCHES + number < done:
                continue
            if rng is not None:
                torch.set_rng_state(torch.Generator().manual_seed(99).get_state() if drops_other(rank) else rng)
                rng = None
            with heartbeat(step=done):
                nn.functional.mse_loss(model(batch), target).backward()
                if done % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            done += 1
            if done % EVERY == 0:
                with section("eval"), torch.no_grad():
                    nn.functional.mse_loss(model.module(inputs), inputs.sum(1, keepdim=True))
                save()
            elif done % 2 == 0 and preemption.check():
                save()
                preemption.exit()
    dist.destroy_process_group()


main()
