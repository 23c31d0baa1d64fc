"""Loops that are asked to leave at awkward places; what they come to stands in files beside the run directory.

`unchanged` knows nothing of the SDK; `own` checks and saves by itself, for `--save` seconds; `starts` is a run of the
SDK that takes long to load what it needs; `ends` saves once more behind its loop, on rank 0.
"""

import argparse
import os
import sys
import time
from pathlib import Path

TOLD, RANK = Path(os.environ["TOLD"]), int(os.environ["RANK"])


def tell(name, text=""):
    (TOLD / f"{name}-{RANK}").write_text(str(text))


def train_step(step):
    time.sleep(0.02)
    if step == 3:
        tell("step", os.getpid())


def slow_save(seconds):
    tell("saves", os.getpid())
    with (TOLD / f"own-{RANK}.part").open("wb") as file:
        for _ in range(int(seconds * 20)):
            file.write(b"x")
            file.flush()
            time.sleep(0.05)
    tell("saved")


def unchanged(options):
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(options.steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        train_step(step)


def own(options):
    from resilience_sdk import heartbeat, preemption

    for step in range(options.steps):
        with heartbeat(step=step):
            train_step(step)
        if preemption.check(step):
            tell("made", step + 1)
            slow_save(options.save)
            preemption.exit()


def starts(options):
    import torch

    import resilience_sdk

    with resilience_sdk.start_run(state={"model": torch.nn.Linear(2, 2)}) as run:
        if not (TOLD / "quick").exists():
            tell("starts", os.getpid())
            time.sleep(600)
        torch.distributed.init_process_group("gloo")
        for step, _ in run.steps([0] * options.steps):
            train_step(step)


def ends(options):
    from resilience_sdk import heartbeat, preemption

    for step in range(options.steps):
        with heartbeat(step=step):
            train_step(step)
        preemption.check()
    if RANK == 0:
        slow_save(options.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["unchanged", "own", "starts", "ends"])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save", type=float, default=0.2)
    chosen = parser.parse_args()
    sys.modules[__name__].__dict__[chosen.kind](chosen)
