"""As `repeated.py`, with Accelerate: `repeated_accelerate.py KIND`."""

from accelerate import Accelerator
from repeated_kinds import (
    FACTOR,
    KIND,
    PER_STEP,
    Mean,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    make_loader,
    plant,
    set_own_rate,
)

from resilience_sdk.adapters import accelerate as resilience

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PER_STEP)
if KIND == "scaler":
    accelerator.scaler = Scaler()  # which it makes itself on a GPU alone
net = model = Model()
optimizer = Optimizer(model.parameters())
scheduler = plain = Scheduler(optimizer)
mean, loader = Mean(), make_loader(is_shared=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if KIND != "rate":  # the script's own
    scheduler = accelerator.prepare(scheduler)
accelerator.register_for_checkpointing(mean)
with resilience.attach(accelerator, checkpoint_every=5) as handle:
    set_own_rate(optimizer, plain)
    for _ in range(handle.epoch, 2 * PER_STEP):
        for (batch,) in loader:
            plant(handle.step, net)
            with accelerator.accumulate(model):
                loss = model(batch).square().mean() * FACTOR
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean.value += loss.item()
