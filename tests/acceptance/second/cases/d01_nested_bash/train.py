"""Primitives in a plain DDP loop that saves by torch.save."""
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told
from resilience_sdk import heartbeat, preemption


def save(model, optimizer, step):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "mine.pt.tmp")
        os.replace("mine.pt.tmp", "mine.pt")
    dist.barrier()


def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    step = 0
    if os.path.exists("mine.pt"):
        saved = torch.load("mine.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < told.total():
        with heartbeat(step=step):
            loss = told.loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(told.pace("step", 0.2))
        told.did(step)
        step += 1
        if step % 10 == 0:
            save(model, optimizer, step)
        if preemption.check(step - 1):
            save(model, optimizer, step)
            preemption.exit()
    heartbeat.done()
    save(model, optimizer, step)
    told.final(model, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
