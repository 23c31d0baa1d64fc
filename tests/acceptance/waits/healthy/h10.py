"""One rank. Its batches come from a producer process by a queue; one comes late."""

import multiprocessing
import urllib.request
import os
import time

import torch
from torch import nn

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


def produce(queue):
    for number in range(120):
        if number == 70:
            urllib.request.urlopen(f"http://{WORLD}/slow?s={130 * SCALE}").read()
        queue.put(number)


context = multiprocessing.get_context("fork")
queue = context.Queue(4)
producer = context.Process(target=produce, args=(queue,), daemon=True)
producer.start()
for step in range(120):
    if step == 70:
        say("WAIT")
    number = queue.get()
    if step == 70:
        say("WENT ON")
    loss = model(torch.randn(4096, 64) + number).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
producer.join()
say("END")
