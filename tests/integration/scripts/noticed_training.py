"""A training of STEPS steps of 50 ms, one line for each.

noticed_training.py STEPS
"""

import os
import sys
import time
from pathlib import Path

import torch

import resilience_sdk

told = Path(os.environ["TOLD"])
with (told / "runs").open("a") as runs:
    runs.write("run\n")
model = torch.nn.Linear(4, 1)
with resilience_sdk.start_run(state={"model": model}, checkpoint_every=1000) as run:
    for step, _ in run.steps(range(int(sys.argv[1]))):
        with (told / "steps").open("a") as steps:
            steps.write(f"{step}\n")
        time.sleep(0.05)
