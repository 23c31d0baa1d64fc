"""Rank 1 waits for an event that a timer sets."""
import threading
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
    for step in range(told.total()):
        if step == 10 and dist.get_rank() == 1:
            ready = threading.Event()
            threading.Timer(told.pace("wait", 85), ready.set).start()
            told.wait_begins()
            ready.wait()  # WAITS
            told.wait_over()
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
