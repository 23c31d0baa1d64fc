"""The batch of step 50 is late: a prefetch thread reads it from a data server, the step waits for an Event."""

import socket
import threading
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

from resilience_sdk import heartbeat, straggler

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


class Prefetcher:
    def __init__(self):
        self.ready = threading.Event()
        self.wanted = threading.Event()
        self.number = 0
        threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    def _run(self):
        while True:
            self.wanted.wait()
            self.wanted.clear()
            slow = 110 * SCALE if self.number == 50 and rank == 1 else 0
            host, port = WORLD.split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"GET /slow?s={slow} HTTP/1.0\r\n\r\n".encode())
                while connection.recv(4096):
                    pass
            self.ready.set()

    def get(self, number):
        self.number = number
        self.wanted.set()
        self.ready.wait()
        self.ready.clear()
        return torch.randn(4)


prefetcher = Prefetcher()
for step in range(100):
    with heartbeat():
        with straggler.section("data"):
            if step == 50 and rank == 1:
                say("WAIT")
            prefetcher.get(step)
            if step == 50 and rank == 1:
                say("WENT ON")
        train_step()
heartbeat.done()

dist.destroy_process_group()
say("END")
