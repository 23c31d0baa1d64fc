"""Rank 1 derives the key of an encrypted data set: one call in C."""
import hashlib
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
            began = time.process_time()
            hashlib.pbkdf2_hmac("sha512", b"word", b"salt", 200_000)
            rounds = int(200_000 * told.pace("wait", 60) / max(1e-3, time.process_time() - began))
            told.wait_begins()
            hashlib.pbkdf2_hmac("sha512", b"word", b"salt", rounds)  # WAITS
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
