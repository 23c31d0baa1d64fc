"""Two DDP ranks save together: one of them cannot write, their clocks differ, and one process resumes alone.

    checkpointing_ranks.py ROOT

Prints what happened as one JSON line.
"""

import json
import resource
import signal
import sys
import time
from pathlib import Path

import forked
import torch
import torch._dynamo  # imported once here instead of in every rank
import torch.distributed as dist
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.errors import CheckpointError
from resilience_sdk.recorder import lookup


class OwnClock:
    """A clock that is advanced by hand, on each rank differently."""

    now_ns = 0

    def monotonic_ns(self):
        return self.now_ns

    def wall_s(self):
        return 0.0


def limit_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make(root, model, **options):
    return Checkpointer({"model": model}, run_dir=root / "run", **options)


def rank_main(root, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    checkpointer = make(root, model)
    report = {"fresh": checkpointer.resume(), "first": checkpointer.save(5)}
    # Rank 1 cannot write its part: no rank may take the checkpoint for saved.
    limit_files(100 if rank == 1 else resource.RLIM_INFINITY)
    report["failed"] = checkpointer.save(6)
    limit_files(resource.RLIM_INFINITY)
    report["last_good"] = checkpointer.last_good.step
    report["on_disk"] = sorted(path.name for path in (root / "run/checkpoints").glob("*step*"))
    dist.barrier()  # before rank 0 begins the next one
    torch.manual_seed(100 + rank)
    report["second"] = checkpointer.save(7)
    report["drawn"] = torch.rand(1).item()
    # Rank 0's clock rules, whatever the other's says.
    clock = OwnClock()
    timed = make(root, model, every="10s", clock=clock)
    report["resumed"] = timed.resume()
    report["drawn_again"] = torch.rand(1).item()
    report["timed"] = []
    for step in range(8, 60):
        clock.now_ns += 1_000_000_000 if rank == 0 else 37_000_000_000
        if timed.maybe_save(step):
            report["timed"].append(step)
    # The same in the background: committed by all or by none.
    behind = make(root, model, every=1, in_background=True)
    behind.resume()
    report["behind"] = [behind.maybe_save(70), behind.wait(30), behind.last_good.step]
    limit_files(100 if rank == 1 else resource.RLIM_INFINITY)
    report["behind"] += [behind.maybe_save(71), behind.wait(30), behind.last_good.step]
    limit_files(resource.RLIM_INFINITY)
    dist.barrier()
    # A step that differs is found, not saved.
    report["differing"] = timed.save(100 + rank)
    # What does not fit on one rank is raised on both.
    try:
        make(root, nn.Linear(3, 3) if rank == 0 else nn.Linear(4, 4)).resume()
    except CheckpointError as error:
        report["misfit"] = str(error)[:60]
    # Rank 1 is killed by its first bytes, before the other knows of its part: nobody waits for what cannot come.
    dist.barrier()
    if rank == 1:
        (root / "report-1").write_text(json.dumps(report))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit_files(10)
    behind.maybe_save(300)
    began = time.monotonic()
    report["killed"] = [behind.wait(60), behind.last_good.step]
    report["killed_s"] = time.monotonic() - began
    (root / f"report-{rank}").write_text(json.dumps(report))
    # Not destroy_process_group(): in forked processes gloo may hang in it. Nobody leaves while the other still talks.
    deadline = time.monotonic() + 60
    while not all((root / f"report-{other}").exists() for other in range(2)) and time.monotonic() < deadline:
        time.sleep(0.01)


def main(root):
    lookup.disable()
    forked.wait([forked.start(lambda rank=rank: rank_main(root, rank)) for rank in range(2)])
    alone = nn.Linear(3, 3)
    step = make(root, alone).resume()
    torch.manual_seed(0)
    same = torch.equal(alone.weight, nn.Linear(3, 3).weight)
    reports = [json.loads((root / f"report-{rank}").read_text()) for rank in range(2)]
    print(json.dumps({"ranks": reports, "alone": step, "same_weights": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
