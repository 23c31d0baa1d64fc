"""A child whose output nobody reads."""
import subprocess
import sys
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
        if step == 20 and dist.get_rank() == 0 and told.first_time():
            child = subprocess.Popen([sys.executable, "-c", "print('x' * 1_000_000)"], stdout=subprocess.PIPE)
            child.wait()  # STUCK-HERE
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
