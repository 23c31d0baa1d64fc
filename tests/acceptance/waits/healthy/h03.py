"""In step 40 rank 0 uploads samples in parts by four client threads and waits for their futures."""

import concurrent.futures
import http.client
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE = float(os.environ.get("WAIT_SCALE", "1"))  # to try the script itself in short
WORLD = os.environ.get("WORLD", "127.0.0.1:1")  # host:port of services outside of the job (run_all.py has them)

import resilience_sdk
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

torch.manual_seed(0)
data = TensorDataset(torch.randn(6400, 64), torch.randn(6400, 1))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
state = {"model": model, "optimizer": optimizer, "data": loader}


def train_step(batch):
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


def put_part(number):
    connection = http.client.HTTPConnection(WORLD)
    connection.request("PUT", f"/upload?s={(130 - number) * SCALE}", body=b"x" * 65536)
    return connection.getresponse().status


def upload():
    with concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="s3") as pool:
        parts = [pool.submit(put_part, number) for number in range(4)]
        done, _ = concurrent.futures.wait(parts)
        assert all(part.result() == 200 for part in done)


with resilience_sdk.start_run(state=state, checkpoint_every=25) as run:
    for step, batch in run.steps(loader):
        if step == 40 and rank == 0:
            say("WAIT")
            upload()
            say("WENT ON")
        train_step(batch)

dist.destroy_process_group()
say("END")
