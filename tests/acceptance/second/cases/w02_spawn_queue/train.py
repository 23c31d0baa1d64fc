"""Rank 1 takes samples from a worker process that first prepares its index."""
import multiprocessing
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told


def worker(queue):
    time.sleep(told.pace("wait", 70))
    queue.put("ready")



def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    for step in range(told.total()):
        if step == 10 and dist.get_rank() == 1:
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=worker, args=(queue,), daemon=True)
            process.start()
            told.wait_begins()
            queue.get()  # WAITS
            told.wait_over()
            process.join()
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
