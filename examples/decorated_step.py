"""A loop that saves by itself: one decorator watches each step, and all ranks leave together when they are asked to.

    resilience run --nproc-per-node 2 --run-dir runs/plane examples/decorated_step.py
    RESILIENCE_FAULT=kill:rank=1,step=70 resilience run ... (the same): restarted behind step 60, and the same result
    resilience rehearse kill preempt -- examples/decorated_step.py

Send it SIGTERM and start it again: it goes on at the next step.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience_sdk

STEPS, SAVE_EVERY = 100, 20
FILE = Path(os.environ.get("RESILIENCE_RUN_DIR", "runs/plane")) / "state.pt"


def main() -> None:
    """Fit a small network to a noisy plane, each rank on its own points."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    slope = torch.randn(8, 1)

    @resilience_sdk.resilient  # a heartbeat, and behind it the question whether all ranks leave
    def train_step(step: int) -> torch.Tensor:
        points = torch.Generator().manual_seed(1000 * step + rank)  # a step's own, whenever it is run
        inputs = torch.randn(32, 8, generator=points)
        loss = nn.functional.mse_loss(model(inputs), inputs @ slope + 0.1 * torch.randn(32, 1, generator=points))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def save(done: int) -> None:
        if rank == 0:  # under another name first: whoever dies while it saves leaves the one before it whole
            FILE.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
            torch.save(state, FILE.with_suffix(".new"))
            FILE.with_suffix(".new").rename(FILE)

    done = 0
    if FILE.exists():
        state = torch.load(FILE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    try:
        while done < STEPS:
            loss = train_step(done)
            done += 1
            if done % SAVE_EVERY == 0:
                save(done)
                if rank == 0:
                    print(f"step {done:3}  loss {loss.item():.4f}")
    except resilience_sdk.Preempted:  # behind a whole step, at the same call on every rank
        save(done + 1)
        raise  # leaves with 75: launchers and schedulers know what it means
    if rank == 0:
        print(f"finished after step {done}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
