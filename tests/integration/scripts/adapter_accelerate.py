"""The contract's training with Accelerate: DDP by `prepare`, a loop of its own, and `adapters.accelerate.attach`."""

from __future__ import annotations

import contract_script as contract
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import resilience_sdk
from resilience_sdk.adapters import accelerate as resilience

CONTRACT = {"module": "accelerate", "package": "accelerate"}

BATCH = 4
args = contract.arguments()
torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
net = contract.Net(args)
model, optimizer, loader = accelerator.prepare(
    net,
    torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    DataLoader(contract.Numbers(), batch_size=BATCH),
)


def evaluate() -> None:
    """Evaluate."""
    model.eval()
    with torch.no_grad():
        for number in range(contract.EVALUATED):
            model(contract.Numbers()[number][0])
    model.train()


def hung() -> list[object]:
    """Return what the adapter may have hung on the objects."""
    return contract.traces(accelerator, model, optimizer, optimizer.optimizer, loader)


before = hung()
handle = resilience.attach(accelerator, save=bool(args.save), **contract.saves(args))
caught = second = None
try:
    resilience.attach(accelerator)
except resilience_sdk.ConfigError as error:
    second = f"ConfigError: {error}"
steps = contract.Steps(handle.step)
watching = steps.watch(optimizer.optimizer)
contract.prepared()

try:
    with handle:
        for inputs, targets in loader:
            if handle.step >= args.steps:
                break
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if args.evaluate and accelerator.sync_gradients and handle.step % args.evaluate == 0:
                evaluate()
except contract.StepError as error:
    caught = str(error)
watching.remove()
contract.end(steps, model, before=before, after=hung(), second=second, caught=caught)
accelerator.end_training()
