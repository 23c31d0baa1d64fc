"""A future of a pool of threads, whose thread runs a program that copies to the object store."""
import concurrent.futures
import subprocess
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told


def upload():
    subprocess.run(["sleep", str(told.pace("wait", 75))], check=True)
    return "etag"



def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    for step in range(told.total()):
        if step == 10 and dist.get_rank() == 0:
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                future = pool.submit(upload)
                told.wait_begins()
                future.result()  # WAITS
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
