"""A training that shuffles, draws and lowers its learning rate: `repeated.py KIND`, which a resume finds other."""

import torch
from repeated_kinds import (
    FACTOR,
    KIND,
    RANKS,
    Mean,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    make_loader,
    plant,
    set_own_rate,
)

import resilience_sdk

loader = make_loader()
net = model = Model()
if RANKS > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = Optimizer(net.parameters())
scheduler, scaler, mean = Scheduler(optimizer), Scaler(), Mean()
state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "mean": mean, "scaler": scaler}
if KIND == "rate":
    del state["scheduler"]
with resilience_sdk.start_run(state=state, checkpoint_every=5) as run:
    set_own_rate(optimizer, scheduler)
    for step, (batch,) in run.steps(loader, epochs=2):
        plant(step, net)
        optimizer.zero_grad()
        loss = model(batch).square().mean() * FACTOR
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        mean.value += loss.item()
        resilience_sdk.numerics.check(loss=loss)
