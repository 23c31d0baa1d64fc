"""A DDP training whose rank 1 kills itself in the first attempts; knows no SDK, runs under any launcher.

Leaves in its directory: `kill-N.json` when it kills itself for the N-th time, and per rank and attempt
`steps-PID.json` with the moments (CLOCK_MONOTONIC, one for the whole machine) of its life.
"""

from __future__ import annotations

import time

started = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

imported = time.monotonic()

KILL_AT, STEPS = 5, 10


def main(out: Path, kills: int) -> None:
    """Train a few steps; die in the middle of them while there are kills left."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    done = len(list(out.glob("kill-*.json")))
    model = DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == KILL_AT and rank == 1 and done < kills:
            (out / f"kill-{done}.json").write_text(json.dumps(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            life = {"rank": rank, "started": started, "imported": imported, "first_step": time.monotonic()}
            (out / f"steps-{os.getpid()}.json").write_text(json.dumps(life))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
