"""One rank that saves after every second of its six steps: `saving.py`."""

import itertools

from torch import nn

import resilience_sdk

with resilience_sdk.start_run(state={"model": nn.Linear(1, 1)}, checkpoint_every=2) as run:
    for _ in run.steps(itertools.count(), max_steps=6):
        pass
