"""Trainings that are killed, and whose resume is exact or not in a way that is known: what their proof has to say.

The scripts are `scripts/repeated*.py`, one for each way in. All are killed behind step 5's checkpoint, so that at least
three steps are done twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from harness import job

from resilience_sdk.core.resume_proof import EXACT, NOT_EXACT, NOT_PROVEN

_PATIENCE_S = 240.0  # an end is waited for, so it is the failure alone that takes as long


@attrs.frozen
class Kind:
    """What is to be said of one kind: the result of all, the part that differs, words of a line."""

    result: str
    component: str | None
    words: str
    is_planted: bool = True
    """Whether the resume is made inexact: to say nothing of it would be wrong."""


@attrs.frozen
class Said:
    """What was said of the newest resume."""

    resume: Mapping[str, Any]
    screen: str
    incidents: tuple[str, ...]
    run_dir: Path

    @property
    def checks(self) -> str:
        """Every check as text."""
        return "\n".join(f"{check['text']}; {check['cure']}" for check in self.resume["checks"])

    def is_found(self, kind: Kind) -> bool:
        """Tell whether there is a finding where there has to be one, or a note, and none where there must not be."""
        if kind.result == NOT_EXACT:
            return self.resume["result"] == NOT_EXACT
        is_right = self.is_limited or self.resume["result"] == kind.result
        return is_right and NOT_EXACT not in self.screen and self._has_said(kind)

    @property
    def is_limited(self) -> bool:
        """Whether it has said that it does not repeat something: it is not called exact, whatever was equal."""
        return bool(self.resume["limits"]) and self.resume["result"] == NOT_PROVEN

    def _has_said(self, kind: Kind) -> bool:
        words = kind.words.removeprefix("resume exact: ") if self.is_limited else kind.words
        return words in self.screen or words in self.checks

    def is_named(self, kind: Kind) -> bool:
        """Tell whether it is found, and called by its name."""
        return self.is_found(kind) and self.resume["component"] == kind.component and self._has_said(kind)


def strike(folder: Path, way: str, kind: str, ranks: int = 1) -> Said:
    """Run such a training to its end. Raises AssertionError where it does not come to it."""
    at = 7 if way == "start_run" else 8  # a step of a framework has its witness once it has ended
    kills = [f"kill:rank=0,step={at}"]
    if kind in OF_LOSS:
        kills.append(f"kill:rank=0,step={at + 5},attempt=1")
    script = "repeated.py" if way == "start_run" else f"repeated_{way}.py"
    words = ("--nproc-per-node", str(ranks), "--max-restarts", str(len(kills)), script, kind)
    env = {"RESILIENCE_FAULT": ";".join(kills)}
    framework = "torch" if way in ("start_run", "attach") else way
    with job(folder, *words, env=env, framework=framework, forked=True) as run:
        assert run.finish(_PATIENCE_S) == 0, run.screen
        program = [sys.executable, "-m", "resilience_sdk", "status", "--json", str(run.run_dir)]
        told = subprocess.run(program, capture_output=True, text=True, check=True, env=os.environ).stdout
        incidents = tuple(incident["kind"] for incident in run.incidents())
        return Said(json.loads(told)["resume"], run.screen, incidents, run.run_dir)


def _good(words: str = "3 of 3 repeated steps equal") -> Kind:
    return Kind(EXACT, None, f"resume exact: {words}", is_planted=False)


def _said(words: str) -> Kind:
    return Kind(EXACT, None, words)


def _state(name: str, what: str = "state") -> Kind:
    component = f"the state of {name}" if what == "state" else f"the options of {name} (learning rate and others)"
    return Kind(NOT_EXACT, component, f"{component} is not as it was saved")


OF_LOSS = ("dropout rate", "late weights", "unsaved")
"""What the loss alone shows: an earlier resume, which is exact, has had equal ones."""
_READ_AGAIN = Kind(
    NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"
)
_GENERATORS = Kind(NOT_EXACT, "generators", "random number generators in another state")
_LOSS = Kind(NOT_EXACT, "loss", ", of the same samples and learning rate; look for what")
_FAR = Kind(NOT_PROVEN, "loss", ", of the same samples and learning rate; look for what", False)
_STREAM = Kind(EXACT, None, "batches of a stream are not repeatable", False)
_STREAM_AGAIN = Kind(NOT_PROVEN, "the order of epoch 0", "batches of a stream are not repeatable", False)
"""Where it is read again."""
_DISPATCHED = Kind(EXACT, None, "other values of samples that are not known: one rank reads the batches for all", False)
"""Where Accelerate has one rank read the stream."""
_ANY_ORDER = Kind(EXACT, None, "batches in any order (in_order=False) are not repeatable", False)
_OTHER_BATCHES = _said("a step has other batches, or the loader other data, than in the first pass")
_COMMON = {
    "good": _good(),
    "untrusted": _FAR,  # a loss alone, where no resume before has had equal ones
    "own rate": _good(),
    "stream": _STREAM,
    "longer": _said("; their learning rates not compared: the training has another length than before"),
    "augmented": _said("3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "seeded": _GENERATORS,
    "python": _GENERATORS,
    "numpy": _GENERATORS,
    "more draws": _GENERATORS,
    "dropout": _GENERATORS,
    "dropout rate": _LOSS,
    "late weights": _LOSS,
    "unsaved": _LOSS,
    "batch size": _OTHER_BATCHES,
}
_READS_AGAIN = {
    "order": _READ_AGAIN,
    "batch": Kind(NOT_EXACT, "samples", "step 6: other samples, the order of epoch 0; let samplers draw"),
    "shard": _READ_AGAIN,
}


def _states(model: str, optimizer: str, scheduler: str, scaler: str) -> dict[str, Kind]:
    return {
        "weights": _state(model),
        "buffers": _state(model),
        "momentum": _state(optimizer),
        "options": _state(optimizer, "options"),
        "scheduler": _state(scheduler),
        "scaler": _state(scaler),
    }


def _rate(cure: str) -> Kind:
    return Kind(NOT_EXACT, "learning rate", f"instead of 0.0531441; {cure}")


_WINDOWS = {"accumulated": _good(), "any order": _ANY_ORDER, "accumulation": _OTHER_BATCHES}
_ATTACH_CURE = "let samplers draw from torch's generators or from set_epoch(epoch), and the loader go on where it was"
START_RUN = {
    **_COMMON,
    "stream": _STREAM_AGAIN,
    **_READS_AGAIN,
    **_states("model", "optimizer", "scheduler", "scaler"),
    "batch": Kind(NOT_EXACT, "samples", "step 6: other samples, the order of epoch 0; the data have to come"),
    "batch size": _said("the loader has other batches, or other data, than before"),
    "rate": Kind(NOT_EXACT, "learning rate", "step 6: learning rate 0.09 instead of 0.0531441"),
    "forgets": _state("mean"),
}
ATTACH = {
    **_COMMON,
    **_WINDOWS,
    **_states("model", "optimizer", "scheduler", "scaler"),
    "order": Kind(NOT_EXACT, "samples", f"step 5: other samples; {_ATTACH_CURE}"),
    "batch": Kind(NOT_EXACT, "samples", f"step 6: other samples; {_ATTACH_CURE}"),
    "shard": Kind(NOT_EXACT, "samples", f"step 5: other samples; {_ATTACH_CURE}"),
    "no state": Kind(NOT_EXACT, "samples", f"step 5: other samples; {_ATTACH_CURE}"),
    "skipping": _good(),
    "rate": _rate("give the scheduler to the state of the Checkpointer"),
    "forgets": _state("mean"),
    "accumulation": _said("step 5 has 2 batches of the loader now, 1 before"),
}
ACCELERATE = {
    **_COMMON,
    **_READS_AGAIN,
    **_WINDOWS,
    **_states("model 0", "optimizer 0", "scheduler 0", "the scaler"),
    "stream": _DISPATCHED,
    "rate": _rate("give the scheduler to accelerator.prepare()"),
    "forgets": _state("custom_object 0"),
}
LIGHTNING = {
    **_COMMON,
    "stream": _STREAM_AGAIN,
    **_READS_AGAIN,
    **_WINDOWS,
    **_states("model", "optimizer 0", "scheduler 0", "the scaler"),
    "stateful": _good(),
    "rate": _rate("return the scheduler from configure_optimizers()"),
}
TRANSFORMERS = {
    **_COMMON,
    **_READS_AGAIN,
    **_WINDOWS,
    **_states("model", "optimizer", "scheduler", "the scaler"),
    "stream": _DISPATCHED,
    "rate": _rate("give the scheduler to Trainer(optimizers=...)"),
}
DEEPSPEED = {
    **_COMMON,
    "stream": _STREAM_AGAIN,
    **_READS_AGAIN,
    **_WINDOWS,
    **{name: _state("model") for name in ("weights", "buffers")},
    "momentum": _state("optimizer"),
    "scheduler": _state("scheduler"),
    "rate": _rate("give the scheduler to deepspeed.initialize("),
    "forgets": _state("mean"),
    "stateful": _good(),
    "own data": _good(),
    "own workers": _good(),
    "own repeated": _good(),
    "repeated": _good(),
    "no loader": _said("attach() was given no loader, so that nobody knows the batches of a step"),
    "own not given": _GENERATORS,  # the loop makes its iterator behind the resume, and that draws
}
_MEGATRON_CURE = "let samplers draw by the samples that are consumed, or from set_epoch(epoch)"
MEGATRON = {
    **_COMMON,
    **_WINDOWS,
    **{name: _state("model") for name in ("weights", "buffers")},
    "momentum": _state("optimizer"),
    "options": _state("optimizer", "options"),
    "scheduler": _state("scheduler"),
    "order": Kind(NOT_EXACT, "samples", f"step 5: other samples; {_MEGATRON_CURE}"),
    "batch": Kind(NOT_EXACT, "samples", f"step 6: other samples; {_MEGATRON_CURE}"),
    "shard": Kind(NOT_EXACT, "samples", f"step 5: other samples; {_MEGATRON_CURE}"),
    "skipping": _good(),
    "rate": _rate("give the OptimizerParamScheduler to sharded_state"),
    "forgets": _state("mean"),
    "accumulation": _said("step 5 has 2 batches of the loader now, 1 before"),
    "no loader": _said("attach() was given no loader, so that nobody knows the batches of a step"),
}
WAYS: Mapping[str, Mapping[str, Kind]] = {
    "start_run": START_RUN,
    "attach": ATTACH,
    "accelerate": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "lightning": LIGHTNING,
    "megatron": MEGATRON,
    "transformers": TRANSFORMERS,
}
ON_RANKS = ("good", "order", "batch", "shard", "seeded", "more draws", "weights", "momentum", "unsaved")
"""What is tried with two ranks as well, of which the last finds it so."""
WAYS_ON_RANKS = ("start_run", "attach", "accelerate", "deepspeed", "lightning", "transformers")


def expected(way: str, kind: str, ranks: int = 1) -> Kind:
    """Return what has to be said."""
    if ranks > 1 and kind == "weights" and way in ("lightning", "transformers"):
        return _good()  # they make DDP behind the load, which hands out the weights of rank 0
    return WAYS[way][kind]


def check(said: Said, kind: str, expected: Kind) -> None:
    """Hold what was said against what was to be."""
    assert said.is_named(expected), (said.resume["result"], said.resume["component"], said.checks, said.screen)
    assert (NOT_EXACT in said.screen) is (expected.result == NOT_EXACT), said.screen
    assert said.resume["step"] == (10 if kind in OF_LOSS else 5)
    assert said.incidents == ("crash",) * (1 + (kind in OF_LOSS))
    if expected.result == NOT_EXACT or (expected.words.startswith("resume exact") and not said.is_limited):
        assert expected.words in said.screen, said.screen
