"""The primitives alone, in any loop, under any launcher.

    python examples/plain_loop.py
    RESILIENCE_FAULT=hang:step=20 RESILIENCE_HEARTBEAT_TIMEOUT=2 python examples/plain_loop.py

Nothing is initialised. The first heartbeat starts the recording, and a monitor beside the process that says
where it is stuck when a step takes too long.
"""

import torch
from torch import nn

from resilience_sdk import heartbeat, straggler

STEPS = 50


def main() -> None:
    """Fit a small network to a noisy plane."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    slope = torch.randn(8, 1)

    for step in range(STEPS):
        with heartbeat():  # one unit of progress: the deadline of a step is learned from these
            inputs = torch.randn(64, 8)
            targets = inputs @ slope + 0.1 * torch.randn(64, 1)
            with straggler.section("fwd"):  # timed and guarded by itself, and named when it is here that it hangs
                loss = nn.functional.mse_loss(model(inputs), targets)
            with straggler.section("bwd"):
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2}  loss {loss.item():.4f}")

    heartbeat.done()  # what comes after the loop may take as long as it likes
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
