"""Writes, as JSON, the microseconds per call of what asks before each step whether to stop. Rank 0 tells."""

from __future__ import annotations

import json
import os
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from resilience_sdk import preemption


def all_reduce() -> None:
    """Ask all ranks, as loops of one's own do."""
    flag = torch.zeros(1)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    assert flag.item() == 0


def broadcast() -> None:
    """Ask rank 0, with the calls that Lightning makes before each batch."""
    flag = torch.tensor([0], device="cpu")
    dist.broadcast(flag, src=0)
    assert flag.item() == 0


def lightnings() -> tuple[Callable[[], None], str]:
    """Return Lightning's own method and its version, else what stands in for it."""
    place = os.environ.get("LIGHTNING_PATH")
    if not place:
        return broadcast, ""
    sys.path.insert(0, place)
    import lightning
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    trainer = SimpleNamespace(received_sigterm=False, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    loop = SimpleNamespace(trainer=trainer)
    return lambda: _TrainingEpochLoop._broadcast_sigterm_tensor(loop), lightning.__version__


def timed(call: Callable[[], None], number: int) -> float:
    """Return the microseconds of one call; all ranks make them together."""
    dist.barrier()
    return timeit.timeit(call, number=number, timer=time.perf_counter) / number * 1e6


def main(out: Path, coordinator: str, repeats: int, collectives: int, checks: int) -> None:
    """Measure all in turns, so that what else the machine does falls on all alike."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lightning, version = lightnings()
    for _ in range(20):  # the first calls connect, and start what there is to start
        preemption.check()
        all_reduce()
        lightning()
        time.sleep(0.05)
    samples: dict[str, list[float]] = {"check": [], "all_reduce": [], "broadcast": []}
    names = {"check": preemption.check}
    for _ in range(repeats):
        dist.barrier()
        # By itself, as two cores of a virtual machine may be one. Without a monitor all must check equally often.
        if coordinator == "ranks" or dist.get_rank() == 0:
            # CPU time: nothing here waits, and time that other processes had is no cost of ours.
            seconds = timeit.timeit("check()", globals=names, number=checks, timer=time.thread_time)
            samples["check"].append(seconds / checks * 1e6)
        samples["all_reduce"].append(timed(all_reduce, collectives))
        samples["broadcast"].append(timed(lightning, collectives))
    if dist.get_rank() == 0:
        out.write_text(json.dumps({**samples, "lightning": version}))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
