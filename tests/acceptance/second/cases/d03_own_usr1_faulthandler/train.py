"""A loop with a Checkpointer; SIGUSR1 prints the stacks, as many scripts have it."""
import faulthandler
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told
from resilience_sdk import heartbeat, preemption
from resilience_sdk.checkpoint import Checkpointer

stacks = open(f"stacks-{os.environ['RANK']}.txt", "w")
faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer}, every=10)
    step = checkpointer.resume()
    while step < told.total():
        with heartbeat(step=step):
            loss = told.loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(told.pace("step", 0.2))
        told.did(step)
        step += 1
        if preemption.check(step - 1):
            checkpointer.save(step)
            preemption.exit()
        if step < told.total():
            checkpointer.maybe_save(step)
    heartbeat.done()
    checkpointer.save(step, last=True)
    told.final(model, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
