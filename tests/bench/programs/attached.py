"""Prints, as JSON, the nanoseconds that `straggler.attach` adds to a step, and those of a section beside it."""

from __future__ import annotations

import json
import os
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resilience_sdk import straggler

section = straggler.section
SHARDED = 40
_TURNS = 6


def plain(layers: int) -> nn.Module:
    """Return a model of two parameters per layer whose arithmetic takes next to no time."""
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def sharded() -> nn.Module:
    """Return a model of `SHARDED` sharded layers, over one rank: the hooks are there, the communication is not."""
    model = plain(SHARDED)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step_of(model: nn.Module) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """Return a training step, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    data = torch.randn(1, 2)

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def added(name: str, model: nn.Module, rounds: int, steps: int) -> dict[str, list[float]]:
    """Time steps with and without hooks in turns, so that what else the machine does falls on both alike."""
    step, optimizer = step_of(model)
    for _ in range(5):
        step()
    result: dict[str, list[float]] = {"step": [], "added": [], "attach": []}
    for _ in range(rounds):
        alone, attached = [], []
        for _ in range(_TURNS):
            alone.append(took(step, steps))
            start = time.thread_time()
            handle = straggler.attach(model, optimizer, prefix=name)
            result["attach"].append((time.thread_time() - start) * 1e9)
            step()
            attached.append(took(step, steps))
            handle.detach()
        # The least of some: what is more was somebody else's.
        result["step"].append(min(alone))
        result["added"].append(min(attached) - min(alone))
    return result


def took(step: Callable[[], None] | str, steps: int) -> float:
    """Return the CPU nanoseconds of one step."""
    return timeit.timeit(step, number=steps, timer=time.thread_time, globals=globals()) / steps * 1e9


def main(rounds: int, loops: int) -> None:
    """Measure everything and print it."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd() / 'store'}", rank=0, world_size=1)
    result: dict[str, dict[str, list[float]]] = {
        "1 layer": added("one.", plain(1), rounds, 100),
        "500 layers": added("many.", plain(500), rounds, 2),
        "sharded": added("sharded.", sharded(), rounds, 2),
    }
    result["section"] = {"added": [took("with section('fwd'): pass", loops) for _ in range(rounds)]}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
