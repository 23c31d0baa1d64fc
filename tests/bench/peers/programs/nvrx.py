"""The same with the heartbeats of NVRx's documentation (Fault Tolerance, Heartbeats API Integration)."""

from __future__ import annotations

import scene
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import fault_tolerance
from plan import STEPS
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    scene.started(rank)
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    model = DistributedDataParallel(scene.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = model(scene.batch(rank, step, dist.all_reduce)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.send_heartbeat()
        scene.stepped(rank, step)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
