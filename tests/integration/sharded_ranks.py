"""Trains, saves and resumes a small model on several gloo ranks, sharded or not; prints what each rank saw as JSON.

    sharded_ranks.py ROOT

Ranks are forked from here, so that torch is imported once. The batch is the same on every rank, so the losses do
not depend on how many there are.
"""

import json
import resource
import sys
import time
from pathlib import Path

import forked
import torch
import torch._dynamo  # imported once here instead of in every rank
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.errors import CheckpointError
from resilience_sdk.recorder import lookup

# What is run in this order: (name, ranks, how the model is wrapped, resumed directory, behind)
PHASES = [
    ("fsdp-2", 2, "fsdp2", None, False),
    ("fsdp-2-to-2", 2, "fsdp2", "fsdp-2", False),
    ("fsdp-2-to-1", 1, "fsdp2", "fsdp-2", False),
    ("fsdp-2-to-4", 4, "fsdp2", "fsdp-2", False),
    ("fsdp-2-to-plain", 1, "plain", "fsdp-2", False),
    ("fsdp-1", 1, "fsdp2", None, False),
    ("fsdp-1-to-2", 2, "fsdp2", "fsdp-1", False),
    ("plain-1", 1, "plain", None, False),
    ("plain-1-to-fsdp-2", 2, "fsdp2", "plain-1", False),
    ("ddp-2", 2, "ddp", None, False),
    ("ddp-2-to-fsdp-2", 2, "fsdp2", "ddp-2", False),
    ("fsdp1-2", 2, "fsdp1", None, False),
    ("fsdp1-2-to-fsdp2-4", 4, "fsdp2", "fsdp1-2", False),
    ("behind-2", 2, "fsdp2", None, True),
    ("behind-2-to-1", 1, "fsdp2", "behind-2", False),
    ("uncopied-2", 2, "fsdp2", None, True),
    ("behind-ddp-2", 2, "ddp", None, True),
    ("behind-ddp-2-to-1", 1, "plain", "behind-ddp-2", False),
]


class Fragile(nn.Linear):
    """A module with something in its state that cannot be copied once `breaks` is set: no memory, a foreign object."""

    breaks = False

    def get_extra_state(self):
        return Piece()

    def set_extra_state(self, state):
        pass


class Piece:
    def __deepcopy__(self, memo):
        if Fragile.breaks:
            raise MemoryError("no room for a copy")
        return self


def limit_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_model(wrapping):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if wrapping == "fsdp2":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    elif wrapping == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif wrapping == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model


def train(model, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        data = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def rank_main(root, phase, rank):
    lookup.disable()
    name, size, wrapping, resumed, behind = phase
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store-{name}", rank=rank, world_size=size)
    model = make_model(wrapping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if name == "uncopied-2":
        state["fragile"] = fully_shard(Fragile(2, 2), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    checkpointer = Checkpointer(state, run_dir=root / (resumed or name), every=1, in_background=behind)
    report = {"resumed": checkpointer.resume()}
    if resumed is None:
        report["at 0"] = checkpointer.save(0)  # before the optimizer has a state
        train(model, optimizer, scheduler, range(3))
        report["begun"] = checkpointer.maybe_save(3)
        report["losses"] = train(model, optimizer, scheduler, range(3, 6))  # while it is written
        report["committed"] = checkpointer.wait(60.0)
        report["last good"] = checkpointer.last_good.step
        if wrapping == "fsdp2" and size > 1:
            # The disk of one rank is full: no rank may take the checkpoint for saved, and none may wait for ever.
            limit_files(300 if rank == 1 else resource.RLIM_INFINITY)
            begun = checkpointer.maybe_save(6)
            report["failed"] = [begun == behind, checkpointer.wait(60.0), checkpointer.last_good.step]
            limit_files(resource.RLIM_INFINITY)
            dist.barrier()
        if name == "uncopied-2":
            # One rank cannot copy its part: the other must not wait for it, nor the training end.
            Fragile.breaks = rank == 1
            report["uncopied"] = [checkpointer.maybe_save(7), checkpointer.wait(60.0), checkpointer.last_good.step]
            Fragile.breaks = False
            report["mended"] = [checkpointer.maybe_save(8), checkpointer.wait(60.0), checkpointer.last_good.step]
    else:
        report["losses"] = train(model, optimizer, scheduler, range(3, 6))
    if name == "fsdp-2-to-plain":
        try:
            Checkpointer({"model": nn.Linear(9, 9)}, run_dir=root / resumed).resume()
        except CheckpointError as error:
            report["misfit"] = str(error)
    if name == "fsdp-2":  # another process alone cannot name the parameters of an optimizer without its module
        optimizer_alone = Checkpointer({"optimizer": optimizer}, run_dir=root / "alone")
        try:
            optimizer_alone.resume()
        except Exception as error:
            report["alone"] = f"{type(error).__name__}: {error}"
    (root / f"report-{name}-{rank}").write_text(json.dumps(report))
    # Not destroy_process_group(): in forked processes gloo may hang in it. Nobody leaves while another still talks.
    deadline = time.monotonic() + 60
    while not all((root / f"report-{name}-{other}").exists() for other in range(size)) and time.monotonic() < deadline:
        time.sleep(0.01)


def run_phase(root, phase):
    codes = forked.wait([forked.start(lambda rank=rank: rank_main(root, phase, rank)) for rank in range(phase[1])])
    reports = [root / f"report-{phase[0]}-{rank}" for rank in range(phase[1])]
    return {"codes": codes, "ranks": [json.loads(path.read_text()) for path in reports if path.exists()]}


if __name__ == "__main__":
    forked.load_once("resilience_sdk.checkpoint", "resilience_sdk.rank")
    place = Path(sys.argv[1])
    wanted = sys.argv[2:] or [phase[0] for phase in PHASES]
    print(json.dumps({phase[0]: run_phase(place, phase) for phase in PHASES if phase[0] in wanted}))
