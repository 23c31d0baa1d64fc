"""Rank 0 opens a FIFO whose writer comes later."""
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told


def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    if dist.get_rank() == 0 and not os.path.exists("shards.fifo"):
        os.mkfifo("shards.fifo")
    for step in range(told.total()):
        if step == 10 and dist.get_rank() == 0:
            told.wait_begins()
            with open("shards.fifo", "rb") as fifo:  # WAITS
                told.wait_over()
                assert fifo.read() == b"data"
        loss = told.loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(told.pace("step", 0.1))
        told.did(step)
    told.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
