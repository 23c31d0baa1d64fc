"""One rank that shuffles, draws and lowers its learning rate: `repeated.py KIND`, which a resume finds other."""

import torch
from repeated_kinds import IS_AGAIN, KIND, Mean, Model, make_loader, plant

import resilience_sdk

loader = make_loader()
model = Model(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
mean, factor = Mean(), 1.0
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "mean": mean, "scaler": scaler}
if KIND == "rate":
    del state["scheduler"]
with resilience_sdk.start_run(state=state, checkpoint_every=5) as run:
    if KIND == "own rate" and IS_AGAIN:
        scheduler.base_lrs = [1.0]
        optimizer.param_groups[0]["lr"] = 1.0
    for step, (batch,) in run.steps(loader, epochs=2):
        plant(step)
        optimizer.zero_grad()
        loss = model(batch).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        mean.value += loss.item()
        factor = 1.0 + 0.1 * step  # which the state does not hold
        resilience_sdk.numerics.check(loss=loss)
