"""Trains a model on the CPU and saves it at once and in the background; prints seconds as JSON.

saving.py RUN_DIR SAVES MEGABYTES
"""

import json
import statistics
import sys
import time

import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.recorder import lookup

lookup.disable()
torch.set_num_threads(1)
run_dir, saves, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
width = 512
# AdamW keeps two numbers per parameter, so three in all.
layers = max(1, megabytes * 1_000_000 // (3 * 4 * width * width))
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def train_step():
    optimizer.zero_grad()
    model(torch.ones(8, width)).square().mean().backward()
    optimizer.step()


found = {"steps": [], "steps beside": []}
train_step()
for in_background in (False, True):
    kind = "background" if in_background else "at once"
    state = {"model": model, "optimizer": optimizer}
    checkpointer = Checkpointer(state, run_dir=f"{run_dir}/{kind}", every=1, in_background=in_background)
    stalls, wholes = [], []
    for number in range(1, saves + 2):
        start = time.perf_counter()
        checkpointer.maybe_save(number)
        stall = time.perf_counter() - start
        while not checkpointer.wait(0.0):
            step = time.perf_counter()
            train_step()
            found["steps beside"].append(time.perf_counter() - step)
        whole = time.perf_counter() - start
        assert checkpointer.last_good.step == number
        if number > 1:  # the first one takes memory and loads code
            stalls.append(stall)
            wholes.append(whole)
        for _ in range(3):
            step = time.perf_counter()
            train_step()
            found["steps"].append(time.perf_counter() - step)
    found[kind], found[f"{kind}, until committed"] = stalls, wholes
found["steps"] = [statistics.median(found["steps"])]
found["steps beside"] = [statistics.median(found["steps beside"])] if found["steps beside"] else []
found["megabytes"] = [3 * 4 * sum(parameter.numel() for parameter in model.parameters()) / 1e6]
print(json.dumps(found))
