"""An Accelerate loop, no SDK in it, that locks its cache twice by two descriptors."""
import fcntl
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import told


def refresh(cache):
    with open(cache, "a") as again:
        fcntl.flock(again, fcntl.LOCK_EX)  # STUCK-HERE


def main():
    told.up()
    accelerator = Accelerator(cpu=True)
    net = told.new_model()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=told.LR), DataLoader(TensorDataset(torch.arange(400)), batch_size=2)
    )
    for step, _ in enumerate(loader):
        if step >= told.total():
            break
        if step == 20 and accelerator.process_index == 0 and told.first_time():
            with open("cache.lock", "a") as mine:
                fcntl.flock(mine, fcntl.LOCK_EX)
                refresh("cache.lock")
        accelerator.backward(told.loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(told.pace("step", 0.1))
        told.did(step)
    told.end()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
