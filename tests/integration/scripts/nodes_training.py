"""A training of gloo ranks that saves every five steps, until the file `TOLD/enough` is there.

Each step is told: `step-ATTEMPT-RANK` holds the newest, `first-ATTEMPT-RANK` the first of this process, and
`pid-ATTEMPT-RANK` names it. A rank sleeps for ever when `TOLD/hang` holds its attempt and number.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilience_sdk import start_run

rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


def is_meant(name: str) -> bool:
    """Tell whether the test has asked this rank to do something."""
    path = told / name
    return path.exists() and path.read_text() == f"{attempt} {rank}"


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.ones(1 << 16, 4)
with start_run(state={"model": model, "optimizer": optimizer}, checkpoint_every=5) as run:
    for step, row in run.steps(data):
        if not (told / f"first-{attempt}-{rank}").exists():
            tell(f"first-{attempt}-{rank}", step)
            tell(f"pid-{attempt}-{rank}", os.getpid())
        if is_meant("hang"):
            time.sleep(3600)
        if is_meant("broken"):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        optimizer.zero_grad()
        (model(row) - 1).square().mean().backward()
        enough = torch.tensor([float(rank == 0 and (told / "enough").exists())])
        dist.all_reduce(enough)
        optimizer.step()
        tell(f"step-{attempt}-{rank}", step)
        time.sleep(0.03)
        if enough.item():
            break
dist.destroy_process_group()
