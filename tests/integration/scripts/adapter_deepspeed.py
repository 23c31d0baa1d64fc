"""The contract's training with DeepSpeed: ZeRO on a CPU, a loop of its own, and `adapters.deepspeed.attach`.

Each scenario has a stage of ZeRO, so that all of them are run; `ZERO_STAGE` is one for all.
"""

from __future__ import annotations

import os
import warnings

import contract_script as contract
import torch
import torch.distributed as dist
from cpu_deepspeed import deepspeed
from torch import nn
from torch.utils.data import DataLoader, Subset

import resilience_sdk
from resilience_sdk.adapters import deepspeed as resilience

CONTRACT = {"module": "deepspeed", "package": "--no-build-isolation deepspeed==0.19.8"}

BATCH = 4
args = contract.arguments()
# Weights are the same with each: sums of two ranks have no order.
STAGE = 3 if args.raise_at >= 0 or args.background or (args.save and args.nan_at >= 0) else 1 if args.save else 2
warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, for what DeepSpeed calls
torch.set_num_threads(1)
torch.manual_seed(0)
deepspeed.init_distributed("gloo")
net = contract.Net(args)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
engine, *_ = deepspeed.initialize(
    model=net,
    optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": args.accumulate,
        "zero_optimization": {"stage": int(os.environ.get("ZERO_STAGE", STAGE))},
        "zero_allow_untested_optimizer": True,
    },
)
loader = DataLoader(
    Subset(contract.Numbers(), range(dist.get_rank(), contract.SAMPLES, dist.get_world_size())), batch_size=BATCH
)


def evaluate() -> None:
    """Evaluate."""
    engine.eval()
    with torch.no_grad():
        for number in range(contract.EVALUATED):
            engine(contract.Numbers()[number][0])
    engine.train()


def hung() -> list[object]:
    """Return what the adapter may have hung on the objects."""
    backend = deepspeed.comm.comm.cdb
    return contract.traces(engine, engine.optimizer, optimizer, engine.checkpoint_engine, backend, loader)


before = hung()
handle = resilience.attach(engine, loader=loader, save=bool(args.save), **contract.saves(args))
caught = second = None
try:
    resilience.attach(engine)
except resilience_sdk.ConfigError as error:
    second = f"ConfigError: {error}"
steps = contract.Steps(handle.step)
watching = steps.watch(optimizer)
contract.prepared()

try:
    with handle:
        for inputs, targets in loader:
            if handle.step >= args.steps:
                break
            engine.backward(nn.functional.mse_loss(engine(inputs), targets))
            was, _ = handle.step, engine.step()
            if args.evaluate and handle.step > was and handle.step % args.evaluate == 0:
                evaluate()
except contract.StepError as error:
    caught = str(error)
watching.remove()
with deepspeed.zero.GatheredParameters(list(net.parameters())):
    contract.end(steps, net, before=before, after=hung(), second=second, caught=caught)
dist.destroy_process_group()
