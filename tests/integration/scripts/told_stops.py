"""Loops that are asked to leave at awkward places; what they come to stands in files beside the run directory.

`unchanged` knows nothing of the SDK; `own` checks and saves by itself, for `--save` seconds; `starts` is a run of the
SDK that takes long to load what it needs; `ends` saves once more behind its loop, on rank 0. `saves` knows nothing of
the SDK either, and saves in its loop, rank 1 in a thread; `uses` checks, and has a use of its own for SIGUSR1; so
has `handles`, which does not check.
"""

import argparse
import faulthandler
import os
import signal
import sys
import threading
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


class SlowFile:
    """A file that takes its time: one byte, and the rest when that is over."""

    def __init__(self, path, seconds):
        self.file, self.seconds = path.open("wb"), seconds

    def write(self, data):
        self.file.write(data[:1])
        self.file.flush()
        tell("saves", os.getpid())
        time.sleep(self.seconds)
        return len(data)

    def flush(self):
        self.file.flush()


def keep(seconds):
    import torch

    torch.save({"weights": torch.ones(1000)}, SlowFile(TOLD / f"step-4-of-{RANK}.pt", seconds))


def saves(options):
    train_step(3)
    if RANK:
        threading.Thread(target=keep, args=(options.save,), daemon=True).start()
    else:
        keep(options.save)
    for step in range(4, options.steps):
        train_step(step)


def handles(options):
    """Has a handler that goes on, and no check."""
    signal.signal(signal.SIGUSR1, lambda *_: tell("handled"))
    for step in range(options.steps):
        train_step(step)


def uses(options):
    """Rank 0 has its stack printed, rank 1 decides on that late, rank 2 has a handler."""
    from resilience_sdk import heartbeat, preemption

    if RANK == 0:
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    elif RANK == 2:
        signal.signal(signal.SIGUSR1, lambda *_: tell("handled"))
    for step in range(options.steps):
        if RANK == 1 and step == 2:
            faulthandler.register(signal.SIGUSR1, all_threads=False)
        with heartbeat(step=step):
            train_step(step)
        if preemption.check(step):
            tell("stopped", step + 1)
            preemption.exit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["unchanged", "own", "starts", "ends", "saves", "uses", "handles"])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save", type=float, default=0.2)
    chosen = parser.parse_args()
    sys.modules[__name__].__dict__[chosen.kind](chosen)
