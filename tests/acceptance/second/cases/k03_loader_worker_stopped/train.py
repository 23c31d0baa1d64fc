"""A DataLoader worker of rank 1 is stopped (a debugger that left, a cgroup freezer, a stray Ctrl-Z)."""
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import told


class Data(Dataset):
    def __len__(self):
        return told.total()

    def __getitem__(self, index):
        if index == 25 and told.rank() == 1 and told.first_time():
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    for index in DataLoader(Data(), batch_size=1, num_workers=1):  # STUCK-HERE
        loss = told.loss_of(model, int(index))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(told.pace("step", 0.2))
        told.did(int(index))
    told.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
