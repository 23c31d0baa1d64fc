"""Beside each script: what it tells its judge, how long things take (pace.json), and one training for all: a small linear model whose
batch follows from step and rank alone, so that the undisturbed end can be computed in one process."""

import json
import os
import time

import torch
from torch import nn

HOME = os.environ.get("SECOND_DIR", ".")
LR = 0.05
NOBODY = ""


def rank():
    return int(os.environ.get("RANK", "0"))


def tell(kind, **values):
    line = json.dumps(dict(kind=kind, rank=rank(), launch=int(os.environ.get("STOPS_LAUNCH", "1")), t=time.time(), **values)) + "\n"
    fd = os.open(os.path.join(HOME, "events.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def up():
    tell("up", host_pid=os.getpid())


def pace(name, default):
    try:
        with open(os.path.join(HOME, "pace.json")) as file:
            return json.load(file).get(name, default)
    except (OSError, ValueError):
        return default


def total():
    return pace("total", 40)


def file(name):
    return os.path.join(HOME, name)


def await_file(name, limit=120):
    end = time.monotonic() + limit
    while not os.path.exists(file(name)) and time.monotonic() < end:
        time.sleep(0.05)


def new_model():
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    model = nn.Linear(6, 1).double()
    torch.random.set_rng_state(state)
    return model


def batch(step, of_rank=None):
    generator = torch.Generator().manual_seed(1000 + 7919 * step + (rank() if of_rank is None else of_rank))
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(8, 1, generator=generator, dtype=torch.float64)


def loss_of(model, step):
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs), targets)


def did(step, **values):
    """A step is complete."""
    tell("step", step=step, **values)


def final(model, steps):
    if rank() == 0:
        weights = [float(v) for p in model.parameters() for v in p.detach().flatten()]
        with open(file("final.json.tmp"), "w") as out:
            json.dump({"steps": steps, "weights": weights}, out)
        os.replace(file("final.json.tmp"), file("final.json"))


def simulate(steps, ranks):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        optimizer.zero_grad()
        for of_rank in range(ranks):
            inputs, targets = batch(step, of_rank)
            (nn.functional.mse_loss(model(inputs), targets) / ranks).backward()
        optimizer.step()
    print(json.dumps({"steps": steps, "weights": [float(v) for p in model.parameters() for v in p.detach().flatten()]}))


# ---- of waits and stuck jobs
def wait_begins():
    print(f"WAIT rank={rank()} t={time.time():.3f}", flush=True)
    tell("wait")


def wait_over():
    print(f"WENT ON rank={rank()} t={time.time():.3f}", flush=True)


def end():
    print(f"END rank={rank()}", flush=True)


def first_time():
    """Whether this rank has not been stuck before."""
    name = file(f"been-stuck-{rank()}")
    if os.path.exists(name):
        return False
    open(name, "w").close()
    print(f"STUCK_AT {time.time():.3f}", flush=True)
    tell("stuck")
    return True
