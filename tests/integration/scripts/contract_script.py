"""What the training scripts of all adapters share: arguments, model, data, and what they tell the contract suite.

The protocol is in `tests/integration/adapters_contract/README.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from resilience_sdk.rank import current
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.page_layout import EVALUATION
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.straggler import attachment, kernels

SAMPLES = 1 << 20
EVALUATED = 3
TRACKED = "tracked-run-7"
SAVED_BY = 6
"""With `--background` rank 1 goes on with this step once a checkpoint is committed; the kill comes behind it."""
_PATIENCE_S = 120.0
WIDTH = 16
attempt = int(os.environ.get("RESILIENCE_INTERNAL_ATTEMPT", "0"))
told = Path(os.environ["TOLD"])


class StepError(Exception):
    """What `--raise-at` raises in a forward."""


def arguments() -> argparse.Namespace:
    """Read the arguments that every script takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, over all attempts")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--save", type=int, default=0, help="save every so many steps, and resume; 0: neither")
    parser.add_argument("--raise-at", type=int, default=-1, help="the forward of this step raises StepError")
    parser.add_argument("--nan-at", type=int, default=-1, help="the loss of rank 1 is NaN in this step of attempt 0")
    parser.add_argument("--evaluate", type=int, default=0, help="evaluate every so many steps, EVALUATED batches")
    parser.add_argument("--background", action="store_true", help="save in the background")
    parser.add_argument("--kernels", action="store_true", help="operators of the CPU stand in for kernels of a GPU")
    parser.add_argument("--asked-early", action="store_true", help="SIGTERM to rank 1 when all is prepared")
    args = parser.parse_args()
    if args.kernels:
        attachment.sampled_device = lambda _model: "CPU"
    return args


def saves(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options by which an adapter saves as the arguments say."""
    return {"checkpoint_every": args.save, "checkpoint_async": args.background} if args.save else {}


class Numbers(Dataset):
    """Samples `(inputs, target)` that follow from their index, enough of them for any test; no loss is a spike."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.sin(torch.arange(WIDTH) * (index % 977 + 1.0))
        return inputs, inputs.sum(0, keepdim=True).tanh()


class Net(nn.Module):
    """A small network whose training forward number `raise_at * accumulate`, from 0, raises `StepError`.

    That number `nan_at * accumulate` gives NaN, on rank 1 of attempt 0.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
        self._fatal = args.raise_at * args.accumulate
        # Megatron's own arguments have none.
        is_killed = getattr(args, "background", False) and (attempt, rank()) == (0, 1)
        self._awaits_save = SAVED_BY * args.accumulate if is_killed else -1
        self._bad = args.nan_at * args.accumulate if (attempt, rank()) == (0, 1) else -1
        self.forwards = 0
        """Training forwards of this attempt."""
        self.evaluated = 0
        """Other ones."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        outputs = self.body(inputs)
        if not self.training:
            self.evaluated += 1
            return outputs
        self.forwards += 1
        if self.forwards - 1 == self._awaits_save:
            await_commit()
        if self.forwards - 1 == self._fatal:
            raise StepError("this batch is bad")
        return outputs * float("nan") if self.forwards - 1 == self._bad else outputs


def await_commit() -> None:
    """Wait until a checkpoint is there as a whole; nothing where nothing is recorded."""
    session, until = current(), time.monotonic() + _PATIENCE_S
    while session is not None and not list(session.run_dir.checkpoints.glob("step-*/manifest.json")):
        if time.monotonic() > until:
            raise TimeoutError("no checkpoint was committed")
        time.sleep(0.01)


def rank() -> int:
    """Return this process's rank."""
    return int(os.environ["RANK"])


def tell(name: str, **facts: Any) -> None:
    """Leave facts for the test, as a whole or not at all."""
    path = told / f"{name}-{attempt}-{rank()}"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.replace(path)


class Steps:
    """Counts real optimizer steps and tells each: `step` is how many are complete, over all attempts."""

    def __init__(self, first: int = 0) -> None:
        """Tell where this attempt begins."""
        self.step = first
        tell("start", step=first, pid=os.getpid())

    def watch(self, optimizer: torch.optim.Optimizer) -> Any:
        """Count the steps of the innermost torch optimizer; return the handle of the hook."""
        return optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.step += 1
        tell("step", step=self.step)


def tracker() -> types.ModuleType:
    """Return what stands for Weights & Biases in a process that has begun a run there."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.run = types.SimpleNamespace(id=TRACKED)
    return module


def prepared() -> None:
    """Tell whether this rank's page promises a first beat; call it when the adapter is in place, before a step.

    And the run of a tracker that is to go on, which the first attempt begins.
    With `--asked-early` rank 1 is then asked to leave, by a signal that reaches it alone.
    """
    tell("tracker", run=os.environ.get("WANDB_RUN_ID"))
    if attempt == 0:
        sys.modules["wandb"] = tracker()
    if "--asked-early" in sys.argv and rank() == 1:
        tell("asked")
        os.kill(os.getpid(), signal.SIGTERM)
    session = current()  # nothing is used here that would have it promise that
    if session is None:
        return
    reader = PageReader(session.page.path)
    try:
        tell("prepared", declared=reader.snapshot().declared)
    finally:
        reader.close()


def end(steps: Steps, model: nn.Module, **facts: Any) -> None:
    """Tell how the training ended; call it last, when the adapter is detached or the framework has torn it down."""
    [net] = [part for part in model.modules() if isinstance(part, Net)]
    finite = all(bool(value.isfinite().all()) for value in model.parameters())
    counted = {"forwards": net.forwards, "evaluated": net.evaluated, "finite": finite}
    tell("end", step=steps.step, digest=digest(model), kernels=_kernels(), **counted, **_page(), **facts)


def digest(model: nn.Module) -> str:
    """Return what is equal only for equal weights."""
    total = hashlib.sha256()
    for value in model.state_dict().values():
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def traces(*found: Any) -> list[Any]:
    """Describe what an adapter may have hung on these objects: hooks, wrapped attributes, another class."""
    return [trace for each in found for trace in _traces_of(each)]


def _traces_of(found: Any) -> Iterable[Any]:
    parts = list(found.modules()) if isinstance(found, nn.Module) else [found]
    for part in parts:
        own = vars(part) if hasattr(part, "__dict__") else {}
        hooks = {name: len(value) for name, value in own.items() if "hooks" in name and hasattr(value, "__len__")}
        calls = {name: _name(value) for name, value in own.items() if callable(value)}
        yield [[_name(kind) for kind in type(part).__mro__], hooks, calls]  # a subclass may have the same name


def _name(value: Any) -> str:
    return getattr(value, "__module__", "") + "." + getattr(value, "__qualname__", type(value).__qualname__)


def _page() -> dict[str, Any]:
    """Return what stands on this rank's own page: beats, passes of sections, and what is still open."""
    recorder = None if os.environ.get("RESILIENCE_DISABLE") else lookup.recorder()
    if recorder is None:
        return {"beats": 0, "sections": {}, "open": []}
    reader = PageReader(recorder.page.path)
    try:
        snapshot = reader.snapshot()
        counts = _counts(recorder)
        passes = {name: count for (name, kind), count in counts.items() if kind != "heartbeat"}
        return {
            "beats": snapshot.beats,
            "evaluation_beats": counts.get((EVALUATION, "heartbeat"), 0),
            "sections": passes,
            "open": [section.name for lane in snapshot.lanes for section in lane.stack],
            "done": snapshot.done,
        }
    finally:
        reader.close()


def _kernels() -> int:
    """Return how many kernels the newest window of this rank had, as its monitor finds it; 0 where none are asked for.

    A thread reads a window behind its step, and may be late.
    """
    until = time.monotonic() + 20 if "--kernels" in sys.argv else 0.0
    while time.monotonic() < until:
        window = kernels.read(lookup.recorder().page.path.with_suffix(kernels.SUFFIX))
        if window is not None:
            return len(window.kernels)
        time.sleep(0.01)
    return 0


def _counts(recorder: Any) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for lane in recorder._lanes.values():
        for block in lane.blocks.values():
            counts[block.name, block.kind] = counts.get((block.name, block.kind), 0) + block.n
    return counts
