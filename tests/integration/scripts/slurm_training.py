"""Trains a line until step TOTAL: slowly while something is still to happen to its job, then as fast as it can.

    slurm_training.py TOLD TOTAL [words that are written down]

SLOW_STARTS in the environment: how many starts are slow, 1 unless given.

Each step is one line in TOLD/steps-RANK: how often the job was requeued, the number of its step in Slurm, the step.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import resilience_sdk

SLOW_STEP_S = 0.1


def main():
    told, total = Path(sys.argv[1]), int(sys.argv[2])
    rank, several = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) > 1
    (told / f"argv-{rank}").write_text(json.dumps(sys.argv[3:]))
    start = (os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURM_STEP_ID"])
    undisturbed = start[1] == "0" and int(start[0]) < int(os.environ.get("SLOW_STARTS", "1"))
    if several:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if several:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(total, 4)
    with (told / f"steps-{rank}").open("a") as steps:
        state = {"model": model, "optimizer": optimizer}
        with resilience_sdk.start_run(state=state, checkpoint_every=10 if undisturbed else 200) as run:
            for step, row in run.steps(data):
                optimizer.zero_grad()
                model(row).square().mean().backward()
                optimizer.step()
                print(*start, step, file=steps, flush=True)
                if undisturbed:
                    time.sleep(SLOW_STEP_S)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
