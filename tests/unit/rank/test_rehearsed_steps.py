"""The looks of a rehearsal, in a training of its own process: hooks of torch are of the whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from resilience_sdk.rank.rehearsed_steps import StepLook

_TRAINING = """
import json, random
from resilience_sdk.rank.rehearsed_steps import StepLooks

looks = StepLooks(lambda look: print(json.dumps(look.to_json())))
looks.install()
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = DataLoader(torch.arange(24.0).reshape(6, 4), batch_size=2)
validation = DataLoader(torch.ones(2, 4))
for epoch in range(2):
    for batch in data:
        looks.at = 0 if looks.at is None else looks.at + 1
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if looks.at == 1:
            torch.rand(1)
    optimizer.param_groups[0]["lr"] /= 2
    for batch in validation:
        pass
"""


def test_each_step_is_looked_at_before_it_is_done() -> None:
    """With its rate, weights, gradients and generators, the newest batch, and the passes over its data."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", _TRAINING], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    looks = [StepLook.from_json(json.loads(line)["look"]) for line in done.stdout.splitlines()]
    assert [look.at for look in looks] == [0, 1, 2, 3, 4, 5]
    assert [look.rate for look in looks] == [0.5] * 3 + [0.25] * 3
    assert [look.passes for look in looks] == [0, 0, 0, 1, 1, 1], "not that of the validation"
    assert [look.batch for look in looks[:3]] == [look.batch for look in looks[3:]]
    assert len({look.batch for look in looks}) == 3
    assert len({look.weights for look in looks}) == 6
    assert looks[0].gradients == looks[3].gradients, "of a linear model they are the sum of the batch"
    drawn = [look.generators["torch"] for look in looks]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({look.generators["Python"] for look in looks}) == 1


def test_a_look_goes_through_json() -> None:
    """It comes back as it was."""
    look = StepLook(3, None, 0.0, {"torch": 7}, None, 2, (1.5, float("inf")), ())
    assert StepLook.from_json(json.loads(json.dumps(look.to_json()))["look"]) == look
