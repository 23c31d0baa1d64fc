"""A shard comes through a pipe from a program that takes its time (a decompressor behind slow tape)."""
import subprocess
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told


def shard():
    feeder = subprocess.Popen(["bash", "-c", f"sleep {told.pace('wait', 45)}; head -c 4096 /dev/zero"], stdout=subprocess.PIPE)
    data = feeder.stdout.read()  # WAITS
    feeder.wait()
    return data



def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    for step in range(told.total()):
        if step == 10 and dist.get_rank() == 0:
            told.wait_begins()
            assert len(shard()) == 4096
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
