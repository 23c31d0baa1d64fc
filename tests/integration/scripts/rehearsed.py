"""A training that does everything by itself, and as it should, or with one fault of integration: the first argument.

alone        only rank 0 calls the save that belongs to all ranks
eats         a handler takes SIGTERM and does nothing
data         the data is not where it was before: the order begins anew
in-place     the checkpoint is written under its own name
rank0        rank 0 leaves at SIGTERM by itself, and the others do not
no-progress  the weights are changed without an optimizer, and nobody is told of a step
"""

import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilience_sdk import preemption
from resilience_sdk.checkpoint import Checkpointer

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
STEPS, EVERY = 40, 10
FILE = "state.pt"


def save(model, optimizer, step: int, data: torch.Generator) -> None:
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if FAULT != "data":
            state["data"] = data.get_state()
        torch.save(state, FILE if FAULT == "in-place" else f"{FILE}.tmp")
        if FAULT != "in-place":
            os.replace(f"{FILE}.tmp", FILE)
    dist.barrier()


def load(model, optimizer, data: torch.Generator) -> int:
    if not os.path.exists(FILE):
        return 0
    state = torch.load(FILE, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if "data" in state:
        data.set_state(state["data"])
    return state["step"]


def leave_alone(number: int, frame: object) -> None:
    os._exit(75)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(7)
    saver = None
    if FAULT == "alone":
        saver = Checkpointer({"model": model, "optimizer": optimizer}, run_dir=os.environ["RESILIENCE_RUN_DIR"])
        first = saver.resume()
    else:
        first = load(model, optimizer, data)
    if FAULT == "eats":
        signal.signal(signal.SIGTERM, lambda number, frame: print("got SIGTERM"))
    if FAULT == "rank0" and rank == 0:
        signal.signal(signal.SIGTERM, leave_alone)
    for step in range(first, STEPS):
        inputs = torch.randn(16, 8, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.02)
        if FAULT == "no-progress":
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.05 * weight.grad
        else:
            optimizer.step()
        if FAULT not in ("eats", "rank0") and preemption.check():
            save(model, optimizer, step + 1, data)
            preemption.exit()
        if (step + 1) % EVERY == 0:
            if saver is None:
                save(model, optimizer, step + 1, data)
            elif rank == 0:
                saver.save(step + 1)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


main()
