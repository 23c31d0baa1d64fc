"""As `repeated.py`, with a loop of one's own: `repeated_attach.py KIND`."""

import torch
from repeated_kinds import IS_AGAIN, KIND, Mean, Model, make_loader, plant
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters import pytorch
from resilience_sdk.checkpoint import Checkpointer

PER_STEP = {"accumulated": 2, "accumulation": 1 + IS_AGAIN}.get(KIND, 1)
model = Model(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
mean, plain = Mean(), make_loader()
if KIND == "stream":
    loader = StatefulDataLoader(plain.dataset, 4)
elif KIND in ("no state", "skipping"):
    loader = plain
else:
    workers = {"num_workers": plain.num_workers, "in_order": plain.in_order}
    loader = StatefulDataLoader(plain.dataset, batch_sampler=plain.batch_sampler, **workers)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "mean": mean, "scaler": scaler}
if KIND == "rate":
    del state["scheduler"]
saver = Checkpointer(state, every=5)
first = saver.resume()
handle = pytorch.attach(model, optimizer, loader, first_step=first)
if KIND == "own rate" and IS_AGAIN:
    scheduler.base_lrs = [1.0]
    optimizer.param_groups[0]["lr"] = 1.0
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
        plant(handle.step)
        loss = model(batch).square().mean()
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
