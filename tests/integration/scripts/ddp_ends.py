"""Ends process groups while gloo's thread may still want the GIL, which the main thread keeps."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    """Three backward passes in a group of their own; the reducer goes with this function's frame."""
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(8, 1), process_group=group)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    dist.destroy_process_group(group)


dist.init_process_group("gloo")
sys.setswitchinterval(1000)
for _ in range(20):
    train()
sys.stdout.write("ended\n")
dist.destroy_process_group()
