"""Trains on four gloo ranks, of which rank 2 loses 200 ms in every backward; prints each rank's sections as JSON.

    attached_ranks.py ROOT MODE...

Modes are `ddp`, `accumulated` (two micro-batches, the first without synchronisation), `compiled`, `fsdp2` and `buffers`
(rank 0, from which the others get them, is late before each forward instead, in nothing that has a section). Ranks
are forked from here, so that torch is imported once. What is printed is read back from the pages by this process, as
the monitor does it: mode -> rank -> section -> [seconds, ...].
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import forked
import torch
import torch._dynamo  # imported once here instead of in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resilience_sdk import straggler
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Recorder

RANKS = 4
SLOW_RANK = 2
SLOW_S = 0.2
STEPS = 6
WIDTH = 64


class Model(nn.Module):
    """Twelve layers; the gradient of the sixth one's output is slow to come where that is asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.slow_s = 0.0

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if number == 6 and self.slow_s:
                x.register_hook(lambda _: time.sleep(self.slow_s))
        return x


def make_model(mode, rank):
    torch.manual_seed(3)
    model = Model()
    slow_s = SLOW_S if rank == SLOW_RANK else 0.0
    if mode == "fsdp2":
        model.slow_s = slow_s
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    if mode == "compiled":
        if slow_s:
            model.layers[6].weight.register_hook(lambda _: time.sleep(slow_s))
        return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    if mode == "buffers":
        model.register_buffer("mean", torch.zeros(WIDTH))
        return nn.parallel.DistributedDataParallel(model)
    model.slow_s = slow_s
    return nn.parallel.DistributedDataParallel(model)


def rank_main(root, mode, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store-{mode}", rank=rank, world_size=RANKS)
    page = RankPage.create(
        root / f"{mode}-{rank}.page",
        pid=os.getpid(),
        start_ticks=1,
        rank=rank,
        local_rank=rank,
        world_size=RANKS,
        attempt=0,
        created_ns=time.monotonic_ns(),
        facts={},
    )
    recorder = Recorder(page)
    lookup.set_starter(lambda: recorder)
    model = make_model(mode, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    straggler.attach(model, optimizer)
    for step in range(STEPS):
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        if mode == "buffers" and rank == 0:
            time.sleep(SLOW_S)
        if mode == "accumulated":
            with model.no_sync():
                model(data).square().mean().backward()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (root / f"done-{mode}-{rank}").touch()
    # Not destroy_process_group(): in forked processes gloo may hang in it. Nobody leaves while another still talks.
    deadline = time.monotonic() + 60
    while not all((root / f"done-{mode}-{other}").exists() for other in range(RANKS)) and time.monotonic() < deadline:
        time.sleep(0.01)


def run_mode(root, mode):
    codes = forked.wait([forked.start(lambda rank=rank: rank_main(root, mode, rank)) for rank in range(RANKS)])
    assert codes == [0] * RANKS, (mode, codes)
    return [read_page(root / f"{mode}-{rank}.page") for rank in range(RANKS)]


def read_page(path):
    with contextlib.closing(PageReader(path)) as reader:
        assert all(not lane.stack for lane in reader.snapshot().lanes)
        return {new.name: [sample / 1e9 for sample in new.samples_ns] for new in reader.passes()}


if __name__ == "__main__":
    print(json.dumps({mode: run_mode(Path(sys.argv[1]), mode) for mode in sys.argv[2:]}))
