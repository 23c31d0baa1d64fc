"""As `repeated.py`, with DeepSpeed: `repeated_deepspeed.py KIND`."""

import torch
from cpu_deepspeed import deepspeed
from repeated_kinds import (
    FACTOR,
    KIND,
    PER_STEP,
    Mean,
    Model,
    Optimizer,
    Scheduler,
    make_loader,
    plant,
    set_own_rate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters import deepspeed as resilience

OWN = ("own data", "own workers", "own repeated", "own not given")
# What the other stages do without the optimizer's own load.
STAGE = 0 if KIND in ("weights", "buffers", "momentum") else 1
deepspeed.init_distributed("gloo")
plain, net = make_loader(), Model()
optimizer = Optimizer(net.parameters())
scheduler = Scheduler(optimizer)
engine, _, own, _ = deepspeed.initialize(
    model=net,
    optimizer=optimizer,
    training_data=plain.dataset if KIND in OWN else None,
    lr_scheduler=None if KIND == "rate" else scheduler,
    config={
        "train_micro_batch_size_per_gpu": plain.batch_size,
        "gradient_accumulation_steps": PER_STEP,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
    },
)
torch.manual_seed(3 + engine.global_rank)  # which DeepSpeed draws from by itself
mean, loader, repeating = Mean(), plain, None
if own is not None:
    loader = own
    loader.num_local_io_workers = 2 if KIND == "own workers" else 0
elif KIND == "stateful":
    loader = StatefulDataLoader(plain.dataset, batch_sampler=plain.batch_sampler)
if KIND in ("repeated", "own repeated"):
    repeating = deepspeed.utils.RepeatingLoader(loader)
given = None if KIND in ("no loader", "own not given") else repeating or loader


def train_step(batch):
    """Train on a micro-batch."""
    before = engine.global_steps
    plant(before, net)
    loss = engine(batch).square().mean() * FACTOR
    engine.backward(loss)
    engine.step()
    if KIND == "rate" and engine.global_steps > before:
        scheduler.step()
    mean.value += loss.item()


with resilience.attach(engine, loader=given, state={"mean": mean}, checkpoint_every=5) as handle:
    set_own_rate(engine.optimizer, scheduler)
    done = handle.step if given is None else 0
    while engine.global_steps < 16:
        if repeating is not None:
            train_step(next(repeating)[0])
            continue
        for number, (batch,) in enumerate(loader):
            if number < done % 8:  # a loop that finds its place by itself
                continue
            done = 0
            train_step(batch)
            if engine.global_steps == 16:
                break
torch.distributed.destroy_process_group()
