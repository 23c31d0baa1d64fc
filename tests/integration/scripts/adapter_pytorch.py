"""The contract's training with plain PyTorch: DDP, a loop of its own, and `adapters.pytorch.attach`."""

from __future__ import annotations

import os

import contract_script as contract
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import resilience_sdk
from resilience_sdk.adapters import pytorch
from resilience_sdk.checkpoint import Checkpointer

CONTRACT = {"module": "torch", "package": "torch"}

BATCH = 4
args = contract.arguments()
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(contract.Net(args))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

saver = None
if args.save:
    saver = Checkpointer(
        {"model": model, "optimizer": optimizer},
        run_dir=os.environ["RESILIENCE_RUN_DIR"],
        every=args.save,
        in_background=args.background,
    )
first = saver.resume() if saver else 0
steps = contract.Steps(first)
steps.watch(optimizer)
done = first * args.accumulate * BATCH * dist.get_world_size()
own = range(done + dist.get_rank(), contract.SAMPLES, dist.get_world_size())
loader = DataLoader(Subset(contract.Numbers(), own), batch_size=BATCH)


def evaluate() -> None:
    """Evaluate."""
    model.eval()
    with torch.no_grad():
        for number in range(contract.EVALUATED):
            model(contract.Numbers()[number][0])
    model.train()


before = contract.traces(model, optimizer, loader)
handle = pytorch.attach(model, optimizer, loader, first_step=first)
contract.prepared()
caught = second = None
try:
    pytorch.attach(model, optimizer)
except resilience_sdk.ConfigError as error:
    second = f"ConfigError: {error}"

batches = iter(loader)
bad_steps = saver.skipped_steps if saver else ()
try:
    while handle.step < args.steps:
        if handle.step in bad_steps:
            for _ in range(args.accumulate):
                next(batches)
            handle.go_to(handle.step + 1)
            continue
        for _ in range(args.accumulate):
            inputs, targets = next(batches)
            (nn.functional.mse_loss(model(inputs), targets) / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        if saver:
            saver.maybe_save(handle.step)
        if args.evaluate and handle.step % args.evaluate == 0:
            evaluate()
except resilience_sdk.Preempted:
    if saver:
        saver.save(handle.step)
    raise
except contract.StepError as error:
    caught = str(error)
handle.detach()
after = contract.traces(model, optimizer, loader)
contract.end(steps, model, before=before, after=after, second=second, caught=caught)
dist.destroy_process_group()
