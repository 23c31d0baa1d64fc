"""Rank 0 waits for a key that an evaluation beside the training sets; the other one waits for rank 0."""
import datetime
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import told


HELPER = """
import sys, time, torch.distributed as dist
time.sleep(float(sys.argv[2]))
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
store.set("evaluated", "0.93")
"""



def main():
    told.up()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(told.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    for step in range(told.total()):
        if step == 10:
            if dist.get_rank() == 0:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=300))
                helper = subprocess.Popen([sys.executable, "-c", HELPER, str(store.port), str(told.pace("wait", 70))])
                told.wait_begins()
                store.wait(["evaluated"])  # WAITS
                told.wait_over()
                helper.wait()
            dist.barrier()
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
