"""Times `numerics.check` and torch's own ways: `checked.py ROUNDS LOOPS` prints nanoseconds per call as JSON."""

import json
import sys
import time
import warnings

import torch

from resilience_sdk import heartbeat, numerics

rounds, loops = map(int, sys.argv[1:])
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 1))
batch = torch.randn(8, 32)


def backward() -> torch.Tensor:
    """One step up to the gradients."""
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def under_anomaly() -> None:
    """The same, watched by autograd."""
    with torch.autograd.detect_anomaly():
        backward()


def timed(call, count: int) -> float:
    """Return nanoseconds per call."""
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - start) / count


loss = backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
with heartbeat(step=0):
    numerics.check(loss=loss)
calls = {
    "check": (lambda: numerics.check(loss=loss, grad_norm=norm), loops),
    "isfinite": (lambda: torch.isfinite(loss).item(), loops),
    "clip": (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), loops // 20),
    "clip_checked": (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
        loops // 20,
    ),
    "step": (backward, loops // 20),
    "anomaly": (under_anomaly, loops // 20),
}
found: dict[str, list[float]] = {name: [] for name in calls}
for _ in range(rounds):
    for name, (call, count) in calls.items():
        found[name].append(timed(call, count))
print(json.dumps(found))
