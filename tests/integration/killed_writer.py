"""Kills a process that saves, at every file operation in turn and at random times, and looks at what is left.

Prints one JSON line: how many children were killed, and everything that was wrong. The children are forked, so
that torch is imported once; they are real processes that die by SIGKILL.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError
from resilience_sdk.checkpoint.store import verify_checkpoint
from resilience_sdk.recorder import lookup

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def make(run_dir, size=64, in_background=False):
    return Checkpointer({"weight": torch.zeros(size)}, run_dir=run_dir, every=1, in_background=in_background)


def die_at(operation):
    """Let this process kill itself just before its `operation`-th operation on files."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in WATCHED:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(action):
    """Run `action` in a forked child and return its wait status."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        action()
        os._exit(0)
    return pid


def save_third(run_dir, operation):
    checkpointer = make(run_dir)
    checkpointer.resume()
    die_at(operation)
    checkpointer.save(3)


def save_third_behind(run_dir, operation):
    """The same in a thread, while this one trains: the process dies in the middle of what nobody waits for."""
    checkpointer = make(run_dir, in_background=True)
    checkpointer.resume()
    die_at(operation)
    checkpointer.maybe_save(3)
    checkpointer.wait()
    assert checkpointer.last_good.step == 3


def save_for_ever_behind(run_dir):
    checkpointer = make(run_dir, size=300_000, in_background=True)
    for step in range(3, 1_000_000):
        checkpointer.maybe_save(step)


def save_for_ever(run_dir):
    checkpointer = make(run_dir, size=300_000)
    for step in range(3, 10_000):
        checkpointer.save(step)


def find_faults(run_dir, least):
    """Return what is wrong with a directory after its writer was killed."""
    place = run_dir / "checkpoints"
    valid = []
    faults = []
    for path in place.glob("step-*"):
        try:
            valid.append(verify_checkpoint(path).step)
        except InvalidCheckpointError as error:
            faults.append(f"{path.name} is visible but damaged: {error}")
    if not valid or max(valid) < least:
        faults.append(f"the newest valid one is {max(valid, default=None)}, not at least {least}")
    if len(valid) < 2:
        faults.append(f"only {valid} is left")
    step = make(run_dir, torch.load(place / f"step-{max(valid):08d}" / "state.pt")["weight"].numel()).resume()
    if step != max(valid):
        faults.append(f"resumed from {step}, not {max(valid)}")
    if hidden := [path.name for path in place.glob(".*") if path.name != ".gitignore"]:
        faults.append(f"leftovers stayed: {hidden}")
    return faults


def main(root):
    lookup.disable()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - to the end
    template = root / "template"
    first = make(template)
    first.save(1)
    first.save(2)
    faults, killed = [], 0
    for third in (save_third, save_third_behind):
        for operation in range(1, 1000):
            run_dir = root / "run"
            shutil.copytree(template, run_dir, ignore=shutil.ignore_patterns("writer.json"))  # a copy is nobody's
            _, status = os.waitpid(in_child(lambda where=run_dir, at=operation, save=third: save(where, at)), 0)
            faults += [f"{third.__name__} at operation {operation}: {fault}" for fault in find_faults(run_dir, 2)]
            shutil.rmtree(run_dir)
            if os.WIFEXITED(status):
                faults += [] if os.WEXITSTATUS(status) == 0 else [f"the writer failed with {status}"]
                break
            killed += 1
    chance = random.Random(7)
    big = root / "big"
    first = make(big, size=300_000)
    first.save(1)
    first.save(2)
    for number in range(16):
        for_ever = save_for_ever_behind if number % 2 else save_for_ever
        pid = in_child(lambda act=for_ever: act(big))
        time.sleep(chance.uniform(0.005, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        faults += [f"killed at random: {fault}" for fault in find_faults(big, 2)]
        killed += 1
    print(json.dumps({"killed": killed, "faults": faults}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
