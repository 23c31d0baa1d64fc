"""Prints what is added to a step on a GPU, and how long a save holds it up, as JSON: `on_gpu.py WAY ROUNDS RUN_DIR`.

WAY is `ours`, `nvrx` (its `straggler.Detector`, as its documentation wraps a model) or `saves`. Seconds.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_STEPS = {"launched": 40, "computed": 10}  # in one turn
_TURNS = 6


class Task:
    """A model with its optimizer, and one step of it."""

    def __init__(self, kind: str) -> None:
        if kind == "launched":  # the thread that launches is what takes the time
            self.model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40))).cuda()
            self._batch = torch.randn(8, 256, device="cuda")
        else:  # the device is
            layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
            self.model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
            self._batch = torch.randn(16, 512, 1024, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=True)

    def step(self) -> None:
        """Make one step, without a wait for the device."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self._batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def took(step: Callable[[], None], steps: int) -> float:
    """Return the seconds of a step, until the device has done them all."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def in_turns(task: Task, way: Callable[[], Any], steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the steps alone and what is added inside of `way()`, a median over short turns for each round."""
    for _ in range(2 * steps):
        task.step()
    found: dict[str, list[float]] = {"step": [], "added": []}
    for _ in range(rounds):
        alone, more = [], []
        for _ in range(_TURNS):
            alone.append(took(task.step, steps))
            with way():
                took(task.step, 3)
                more.append(took(task.step, steps) - alone[-1])
        found["step"].append(statistics.median(alone))
        found["added"].append(statistics.median(more))
    return found


def ours(rounds: int, run_dir: Path) -> dict[str, dict[str, list[float]]]:
    """Measure the adapter of plain PyTorch, and a window in which kernels are timed."""
    from resilience_sdk.adapters import pytorch
    from resilience_sdk.straggler.kernels import KernelSampler

    found = {}
    for kind, steps in _STEPS.items():
        task = Task(kind)

        @contextlib.contextmanager
        def attached(task: Task = task) -> Iterator[None]:
            handle = pytorch.attach(task.model, task.optimizer)
            yield
            handle.detach()

        found[kind] = in_turns(task, attached, steps, rounds)
        found[kind]["window"] = []
        for _ in range(2 * rounds + 2):
            sampler = KernelSampler(0.0, run_dir / "kernels.json")
            alone = took(task.step, 1)

            def watched(sampler: KernelSampler = sampler, task: Task = task) -> None:
                sampler.step_ends()
                task.step()
                sampler.step_ends()

            found[kind]["window"].append(took(watched, 1) - alone)
            sampler.join(30.0)
        del found[kind]["window"][:2]  # these load the profiler
    return found


def nvrx(rounds: int, run_dir: Path) -> dict[str, dict[str, list[float]]]:
    """Measure NVRx's detector, which times each kernel of the forward pass and the optimizer by default."""
    from nvidia_resiliency_ext import straggler

    found = {}
    for kind, steps in _STEPS.items():
        task = Task(kind)

        @contextlib.contextmanager
        def wrapped(task: Task = task) -> Iterator[None]:
            straggler.Detector.initialize(profiling_interval=1, report_time_interval=300.0)
            straggler.Detector.wrap_callables(
                [straggler.CallableId(task.model, "forward"), straggler.CallableId(task.optimizer, "step")]
            )
            yield
            straggler.Detector.shutdown()

        found[kind] = in_turns(task, wrapped, steps, rounds)
    return found


def saves(rounds: int, run_dir: Path) -> dict[str, list[float]]:
    """Measure saves at once and in the background, and torch's own in the background."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from resilience_sdk.checkpoint import Checkpointer

    task = Task("computed")
    for _ in range(5):
        task.step()
    found: dict[str, list[float]] = {"step": [took(task.step, 10) for _ in range(rounds)]}
    size = sum(3 * 4 * parameter.numel() for parameter in task.model.parameters())
    found["megabytes"] = [size / 1e6]
    for in_background in (False, True):
        kind = "background" if in_background else "at once"
        state = {"model": task.model, "optimizer": task.optimizer}
        saver = Checkpointer(state, run_dir=run_dir / kind, every=1, in_background=in_background, keep=2)
        found[kind] = []
        for number in range(1, rounds + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            saver.maybe_save(number)
            found[kind].append(time.perf_counter() - start)
            while not saver.wait(0.0):
                task.step()
                torch.cuda.synchronize()
        del found[kind][:1]  # it takes memory and loads code
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{run_dir}/store", rank=0, world_size=1)
    found["torch in the background"] = []
    for number in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model, optimizer = get_state_dict(task.model, task.optimizer)
        writing = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=run_dir / f"dcp-{number % 2}")
        found["torch in the background"].append(time.perf_counter() - start)
        while not writing.done():
            task.step()
            torch.cuda.synchronize()
    del found["torch in the background"][:1]
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    way, count, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(json.dumps({"ours": ours, "nvrx": nvrx, "saves": saves}[way](count, directory)) + "\n")
