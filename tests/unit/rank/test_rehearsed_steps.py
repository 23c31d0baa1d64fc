"""The looks of a rehearsal, in a training of its own process: hooks of torch are of the whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from resilience_sdk.rank.rehearsal import read_traces
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


def test_what_was_counted_before_the_first_step_of_an_optimizer_is_no_step(tmp_path: Path) -> None:
    """Collectives of the start are taken for steps, on a machine that is slow, until there is one of an optimizer."""
    look = StepLook(0).to_json()
    lines = [{"step": 0, "t": 1.0}, look, {"step": 0, "t": 2.0}, look, {"step": 1, "t": 3.0}, {"progress": "optimizer"}]
    (tmp_path / "attempt-0-rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [trace] = read_traces(tmp_path)
    assert trace.steps == ((0, 2.0), (1, 3.0))
    assert [one.at for one in trace.looks] == [None, 0]


def test_what_a_framework_writes_beside_our_checkpoints_does_not_count(tmp_path: Path) -> None:
    """Lightning's own ModelCheckpoint, say: nobody resumes from it. Alone, it does."""
    own, ours = {"save": "/a/b.ckpt", "t": 1.0}, {"save": None, "t": 2.0, "ours": True}
    step = {"step": 0, "t": 0.5}
    path = tmp_path / "attempt-0-rank-0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (step, own)))
    assert read_traces(tmp_path)[0].saves == (1,)
    path.write_text("".join(json.dumps(line) + "\n" for line in (own, step, ours, own)))
    assert [(one.saves, len(one.saved)) for one in read_traces(tmp_path)] == [((1,), 1)]
