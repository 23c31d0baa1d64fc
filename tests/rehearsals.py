"""`resilience rehearse` as a user calls it, and what it has to say of each example: what may be skipped, and why.

Every other promise has to be kept, whatever else the machine does. `.ci/run` rehearses one example, `.ci/release` each
under the faults that tell most of it; `python -m tests.bench --only rehearsals` all of them.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

PROJECT = Path(__file__).parent.parent
EXAMPLES = PROJECT / "examples"
ALL = ("all",)
_LONGEST_S = 1500.0

Skips = Mapping[tuple[str, str], str]
"""Of a fault and a promise, how the reason begins for which it is skipped; `none` is the undisturbed run."""

# What a short run need not come to.
MAY: Mapping[str, str] = {
    "kill-in-window": "gradients are added up over no several batches",
    "kill-in-eval": "no evaluation is seen",
    "kill-at-epoch-end": "no epoch comes to its end",
}

_NO_SAVE = "the script saves nothing"
NO_SAVES: Skips = {
    ("none", "save complete"): _NO_SAVE,
    **{
        (fault, promise): _NO_SAVE
        for fault in ("kill", "exit", "exception", "hang", "hang-gil", *MAY, "kill-twice")
        for promise in ("save complete", "steps lost")
    },
    ("preempt", "save complete"): _NO_SAVE,
    ("disk-full", "rehearsed"): _NO_SAVE,
    ("corrupt-checkpoint", "rehearsed"): _NO_SAVE,
    ("kill-in-save", "rehearsed"): _NO_SAVE,
}
NO_SECTIONS: Skips = {("slow", "rehearsed"): "no section shows what a rank does"}
ALONE: Skips = {("slow", "rehearsed"): "the script is one process"}
NO_LOSS: Skips = {("nan", "rehearsed"): "the loss is not shown to the SDK"}
LOSS: Skips = {
    ("nan", "named"): "what is not a number reaches every rank",
    ("nan", "recovered"): "numerics=warn tells of it, and goes on",
    ("nan", "end equal"): "a step with a bad gradient cannot end as one without",
}


@attrs.frozen
class Example:
    """One file of `examples/`, and what a rehearsal of it says."""

    skips: Skips
    telling: tuple[str, ...]
    """The faults by which most is seen of it."""
    needs: tuple[str, str] | None = None
    """A module without which it cannot run, and what pip calls it."""


REHEARSED: Mapping[str, Example] = {
    "plain_loop.py": Example({**NO_SAVES, **ALONE, **NO_LOSS}, ("hang",)),
    "unchanged_ddp.py": Example({**NO_SAVES, **NO_SECTIONS, **NO_LOSS}, ("exception",)),
    "decorated_step.py": Example({**NO_SECTIONS, **NO_LOSS}, ("disk-full", "corrupt-checkpoint", "preempt")),
    "full_run.py": Example(LOSS, ("preempt",)),
    "pytorch_attach.py": Example(LOSS, ALL),
    "lightning_fit.py": Example(LOSS, ("kill",), ("lightning", "lightning")),
    "trainer_fit.py": Example(LOSS, ("corrupt-checkpoint",), ("transformers", "transformers")),
    "accelerate_train.py": Example(LOSS, ("preempt",), ("accelerate", "accelerate")),
    "deepspeed_train.py": Example(LOSS, ("kill",), ("deepspeed", "--no-build-isolation deepspeed==0.19.8")),
    "megatron_on_cpu.py": Example(LOSS, ("disk-full",), ("megatron.core", "megatron-core==0.16.1")),
}


@attrs.frozen
class Rehearsed:
    """What the command has said, and what it left in its folder for temporary files."""

    code: int
    document: dict[str, Any]
    screen: str
    left: list[Path]

    def results(self, fault: str) -> dict[str, str]:
        """Return what came of each promise of a fault; `none` is the undisturbed run."""
        return {promise["promise"]: promise["result"] for name, promise in self.promises() if name == fault}

    def promises(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return each fault with each of its promises."""
        return ((one["fault"], promise) for one in self.document["faults"] for promise in one["promises"])

    def count(self, result: str) -> int:
        """Return how many promises came to this."""
        return sum(promise["result"] == result for _, promise in self.promises())

    def surprises(self, skips: Skips) -> list[str]:
        """Return what is neither kept nor skipped for its known reason, and what should have been skipped."""
        told = []
        for fault, promise in self.promises():
            reason = skips.get((fault, promise["promise"]))
            if fault in MAY and promise["promise"] == "rehearsed" and promise["why"].startswith(MAY[fault]):
                continue
            is_skipped = promise["result"] == "SKIPPED"
            if is_skipped and (reason is None or not promise["why"].startswith(reason)):
                told.append(f"{fault}, {promise['promise']}: skipped, {promise['why']}")
            elif not is_skipped and (reason is not None or promise["result"] != "PASS"):
                told.append(f"{fault}, {promise['promise']}: {promise['result']}, {promise['why']}")
        return told


def rehearse(folder: Path, *words: str, script: Path, arguments: tuple[str, ...] = ()) -> Rehearsed:
    """Rehearse a script, as a user does from an empty directory, in which nothing may be found afterwards."""
    # A short path: Megatron's saves make a socket below it, whose whole name may have 107 characters.
    temporary, here = Path(tempfile.mkdtemp(prefix="rehearsed-", dir="/tmp")), folder.absolute() / "here"
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    here.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "SLURM_"))}
    env = own | {"PYTHONPATH": str(PROJECT), "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", "rehearse", *words, "--json", "--", str(script), *arguments],
        env=env | {"RESILIENCE_RUN_DIR": str(here / "mine")},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
    )
    assert done.stdout, done.stderr
    assert list(here.iterdir()) == [], "nothing of the user's is touched"
    return Rehearsed(
        done.returncode, json.loads(done.stdout), done.stderr, list(temporary.glob("resilience-rehearse*"))
    )
