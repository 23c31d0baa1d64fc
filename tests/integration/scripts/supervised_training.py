"""A training of 30 steps that saves every 5, and waits in step 12 of its first run until it is ended."""

import os
import time
from pathlib import Path

import torch

import resilience_sdk

told = Path(os.environ["TOLD"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer}
with (told / "runs").open("a") as runs:
    runs.write("run\n")
with resilience_sdk.start_run(state=state, checkpoint_every=5) as run:
    for step, batch in run.steps([torch.ones(4)] * 30):
        with (told / "steps").open("a") as steps:
            steps.write(f"{step}\n")
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 12 and not (told / "waiting").exists():
            (told / "waiting").touch()
            while True:
                time.sleep(0.02)
