"""In step 50 all ranks ask a reward server by asyncio, as RL loops do; the answers take long."""

import asyncio
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


async def ask(number, seconds):
    host, port = WORLD.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /slow?s={seconds} HTTP/1.0\r\n\r\n".encode())
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return len(answer)


async def rewards():
    return await asyncio.gather(*(ask(i, (100 - i) * SCALE) for i in range(4)))


def reward_phase():
    say("WAIT")
    asyncio.run(rewards())
    say("WENT ON")


for step in range(100):
    train_step(reward_phase if step == 50 else None)

dist.destroy_process_group()
say("END")
