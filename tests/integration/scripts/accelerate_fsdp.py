"""A training that Accelerate shards (FSDP2) on two ranks: `accelerate_fsdp.py STEPS`.

Accelerate takes FSDP into account on accelerators alone. `--shard-on-cpu` tells it that these ranks have some, which is
all that it takes to shard on a CPU; without it, what Accelerate does there by itself is seen.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters import accelerate as resilience
from resilience_sdk.errors import CheckpointError

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--shard-on-cpu", action="store_true")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
state = PartialState(cpu=True)
if args.shard_on_cpu:
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
accelerator = Accelerator()
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
inputs = torch.randn(256, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)


def tell(name: str, **facts: object) -> None:
    """Leave facts for the test."""
    attempt = os.environ.get("RESILIENCE_INTERNAL_ATTEMPT", "0")
    (Path(os.environ["TOLD"]) / f"{name}-{attempt}-{accelerator.process_index}").write_text(json.dumps(facts))


def fail(*_: object) -> None:
    """Fail in a save, on one rank."""
    if accelerator.process_index == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


seen = []
with resilience.attach(accelerator, checkpoint_every=5) as handle:
    tell("start", step=handle.step, epoch=handle.epoch, samples=handle.samples)
    while handle.step < args.steps:
        for batch, target in loader:
            accelerator.backward(nn.functional.mse_loss(model(batch), target))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(batch.sum().item())
            if handle.step >= args.steps:
                break
    own = Path(os.environ["TOLD"], "own")
    accelerator.save_state(str(own))
    accelerator.load_state(str(own))  # which makes a step of its own in the optimizer
    after_load = handle.step
    failing = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(CheckpointError, match="rank 1: No space left on device"):  # on both
        accelerator.save_state(str(own))
    failing.remove()
kinds = sorted({type(parameter).__name__ for parameter in model.parameters()})
weights = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
tell("end", step=handle.step, after_load=after_load, samples=handle.samples, kinds=kinds, weights=weights, seen=seen)
accelerator.end_training()
