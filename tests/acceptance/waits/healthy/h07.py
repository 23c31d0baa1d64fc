"""Behind the loop rank 0 has the weights converted by a slow tool; the other rank is in a barrier."""

import subprocess
import sys
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def train_step(before_backward=None):
    loss = model(torch.randn(512, 64)).square().mean()
    if before_backward:
        before_backward()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)

TOOL = """
import sys, time, urllib.request
weights = open(sys.argv[1], "rb").read()
urllib.request.urlopen("http://%s/slow?s=%s" % (sys.argv[2], sys.argv[3])).read()  # asks the optimizer service
open(sys.argv[1] + ".onnx", "wb").write(weights)
print("converted")
"""

for step in range(100):
    train_step()
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
    say("WAIT")
    done = subprocess.run(
        [sys.executable, "-c", TOOL, "model.pt", WORLD, str(140 * SCALE)], capture_output=True, text=True, check=True
    )
    print(done.stdout.strip(), flush=True)
    say("WENT ON")
dist.barrier()

dist.destroy_process_group()
say("END")
