"""A script that knows nothing of the SDK.

    resilience run --nproc-per-node 2 examples/unchanged_ddp.py
    RESILIENCE_FAULT=kill:rank=1,step=30 resilience run ... (the same): rank 1 is named, and it starts over
    torchrun --nproc-per-node 2 -m resilience_sdk.auto examples/unchanged_ddp.py

Progress is seen from the optimizer's steps. A rank that dies or hangs is named and the ranks are restarted;
as the script saves nothing, they begin at its beginning.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def main() -> None:
    """Fit a small network to a noisy plane, each rank on its own points."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slope = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for step in range(STEPS):
        inputs = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(inputs), inputs @ slope + 0.1 * torch.randn(32, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step:2}  loss {loss.item():.4f}")

    if rank == 0:
        print(f"final loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
