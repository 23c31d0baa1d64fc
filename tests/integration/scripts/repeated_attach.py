"""As `repeated.py`, with a loop of one's own: `repeated_attach.py KIND`."""

import torch
from repeated_kinds import (
    FACTOR,
    KIND,
    PER_STEP,
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
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters import pytorch
from resilience_sdk.checkpoint import Checkpointer

net = model = Model()
if RANKS > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = Optimizer(net.parameters())
scheduler, scaler = Scheduler(optimizer), Scaler()
mean, plain = Mean(), make_loader()
if KIND == "stream":
    loader = StatefulDataLoader(plain.dataset, 4)
elif KIND in ("no state", "skipping"):
    loader = plain
else:
    workers = {"num_workers": plain.num_workers, "in_order": plain.in_order}
    loader = StatefulDataLoader(plain.dataset, batch_sampler=plain.batch_sampler, **workers)
state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "mean": mean, "scaler": scaler}
if KIND == "rate":
    del state["scheduler"]
saver = Checkpointer(state, every=5)
first = saver.resume()
handle = pytorch.attach(model, optimizer, loader, first_step=first)
set_own_rate(optimizer, scheduler)
batches = 0
skip = first if KIND == "skipping" else 0
while handle.step < 16:
    if KIND == "skipping":
        torch.manual_seed(3)  # of the order
    for (batch,) in loader:
        if skip:
            skip -= 1
            if not skip:
                saver.restore_rng()
            continue
        plant(handle.step, net)
        loss = model(batch).square().mean() * FACTOR
        scaler.scale(loss).backward()
        batches += 1
        if batches % PER_STEP == 0:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            mean.value += loss.item()
            saver.maybe_save(handle.step)
        if handle.step == 16:
            break
handle.detach()
saver.save(handle.step, last=True)
