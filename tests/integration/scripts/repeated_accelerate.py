"""As `repeated.py`, with Accelerate: `repeated_accelerate.py KIND`."""

import torch
from accelerate import Accelerator
from repeated_kinds import IS_AGAIN, KIND, Mean, Model, make_loader, plant

from resilience_sdk.adapters import accelerate as resilience

PER_STEP = {"accumulated": 2, "accumulation": 1 + IS_AGAIN}.get(KIND, 1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PER_STEP)
model = Model(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
mean = Mean()
if KIND == "rate":  # the script's own
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
else:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, make_loader(), scheduler)
accelerator.register_for_checkpointing(mean)
with resilience.attach(accelerator, checkpoint_every=5) as handle:
    if KIND == "own rate" and IS_AGAIN:
        scheduler.scheduler.base_lrs = [1.0]
        optimizer.param_groups[0]["lr"] = 1.0
    for _ in range(handle.epoch, 2 * PER_STEP):
        for (batch,) in loader:
            plant(handle.step)
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean.value += loss.item()
