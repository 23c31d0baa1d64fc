"""An unchanged script that asks its feature store by name after a few steps."""
import socket
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
        if step == 3 and dist.get_rank() == 0:
            socket.create_connection((told.pace("host", "features.train-data.invalid"), told.pace("port", 8080)), timeout=5).close()
        loss = told.loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(told.pace("step", 0.05))
        told.did(step)
    told.final(model, told.total())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
