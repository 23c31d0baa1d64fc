"""A training of two gloo ranks in which something happens to rank 1 in a step of its loop.

Who tells the steps is the argument: `optimizer` (the script knows nothing of the SDK), `numbered` (a beat with the step
at the end of each) or `decorated`.
In attempt 1 it raises in step 6, in attempt 2 it is stopped in step 7. What happens in attempt 0 is a fault's doing.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

way = sys.argv[1]
rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(step: int) -> None:
    """Make one step."""
    if (rank, attempt, step) == (1, 1, 6):
        raise ValueError("in step 6")
    if (rank, attempt, step) == (1, 2, 7):
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()


if way == "optimizer":
    for step in range(10):
        train_step(step)
else:
    from resilience_sdk import heartbeat

    decorated = heartbeat()(train_step)
    for step in range(10):
        if way == "decorated":
            decorated(step)
        else:
            train_step(step)
            heartbeat.beat(step if way == "numbered" else None)
    heartbeat.done()
dist.destroy_process_group()
