"""A tracker like W&B: its uploader thread is flushed when the interpreter ends, and the upload is slow."""

import atexit
import http.client
import queue
import threading
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


class Tracker:
    def __init__(self):
        self.queue = queue.Queue()
        self.thread = threading.Thread(target=self._upload, name="tracker", daemon=True)
        self.thread.start()
        atexit.register(self.finish)

    def _upload(self):
        while True:
            item = self.queue.get()
            if item is None:
                return
            connection = http.client.HTTPConnection(WORLD)
            connection.request("PUT", f"/upload?s={item}", body=b"x" * 1000)
            connection.getresponse().read()

    def finish(self):
        say("WAIT")
        self.queue.put(None)
        self.thread.join()
        say("WENT ON")


tracker = Tracker() if rank == 0 else None
for step in range(100):
    train_step()
    if tracker and step % 50 == 0:
        tracker.queue.put(0)
if tracker:
    tracker.queue.put(100 * SCALE)

dist.destroy_process_group()
say("END")
