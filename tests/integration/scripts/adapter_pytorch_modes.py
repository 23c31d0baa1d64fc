"""Plain PyTorch's ways to train on several ranks, one after the other, each attached and detached.

Each rank tells, per way, what was counted in it: `counts-<attempt>-<rank>`.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import contract_script as contract
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk.adapters import pytorch
from resilience_sdk.recorder import lookup

STEPS, MICRO_BATCHES = 6, 3


def layers() -> nn.Sequential:
    """Return a model of two layers."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def sharded() -> nn.Module:
    """Return it spread over the ranks by FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled_in_place() -> nn.Module:
    """Return a model under DDP that has compiled itself."""
    model = DistributedDataParallel(layers())
    model.compile(backend="eager")
    return model


WAYS = {
    "ddp": lambda: DistributedDataParallel(layers()),
    "fsdp2": sharded,
    "compiled": lambda: torch.compile(DistributedDataParallel(layers()), backend="eager"),
    "compiled in place": compiled_in_place,
}


def counted() -> Counter[str]:
    """Return how often each block has been passed so far."""
    owner = lookup.recorder().owner
    return Counter({block.name: block.n for block in owner.blocks.values()})


def waiting(model: nn.Module, micro_batch: int):
    """Return what keeps all but the last micro-batch from being synchronised."""
    is_last = micro_batch == MICRO_BATCHES - 1
    if is_last or not hasattr(model, "no_sync"):
        return contextlib.nullcontext()
    return model.no_sync()


def train(model: nn.Module) -> dict[str, int]:
    """Train with accumulated gradients under the adapter; return what was counted."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(STEPS * MICRO_BATCHES * 2, 8), batch_size=2)
    before = counted()
    with pytorch.attach(model, optimizer, loader) as handle:
        for number, batch in enumerate(loader):
            with waiting(model, number % MICRO_BATCHES):
                model(batch).square().mean().backward()
            if (number + 1) % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        return {"handle": handle.step, **(counted() - before)}


torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
contract.tell("counts", **{way: train(make()) for way, make in WAYS.items()})
dist.destroy_process_group()
