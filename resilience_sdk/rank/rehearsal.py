"""The trace that a rank of a rehearsal leaves: its steps and what was seen in each, its saves, its weights at the end.

A rehearsal compares these with an undisturbed run's, whatever the script prints and wherever it saves. A line is
written by one `write`, so a rank that is killed leaves all that it has done.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk import faults, torch_saves
from resilience_sdk.core.console import say_once
from resilience_sdk.core.plain_file import plain, read_bytes, read_text
from resilience_sdk.rank import rehearsed_records
from resilience_sdk.rank.rehearsed_steps import StepLook, StepLooks
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.recorder.witness_ring import SUFFIX, WitnessedStep, read_ring
from resilience_sdk.system.imports import when_imported

if TYPE_CHECKING:
    from resilience_sdk.rank.session import WatchedSession

ANSWERED = "answered"
"""A file beside the traces: what was to follow from the fault has been seen, so nothing need be slow any more."""
_SOURCES = {at.BEATS_USER: "heartbeats", at.BEATS_OPTIMIZER: "optimizer", at.BEATS_COLLECTIVES: "collectives"}

_EVALUATIONS = ("eval", "valid")
"""Parts of the names of sections in which a training is evaluated."""
_PASSES = ("fwd", "forward", "bwd", "backward")
_FRAMEWORKS: Mapping[str, frozenset[str]] = {
    "lightning": frozenset({"lightning.pytorch.trainer", "pytorch_lightning.trainer"}),
    "transformers": frozenset({"transformers.trainer"}),
    "deepspeed": frozenset({"deepspeed.runtime.engine"}),
    "megatron": frozenset({"megatron.core"}),
    "accelerate": frozenset({"accelerate.accelerator"}),
}


@attrs.frozen
class Weight:
    """One weight of an optimizer, or this rank's part of it, as far as it is compared with another one."""

    norm: float
    sum: float
    shape: tuple[int, ...] = ()


@attrs.frozen
class RehearsedRank:
    """One rank in one attempt. `steps`: the number of each, as the loop counts it, and when, in monotonic seconds."""

    attempt: int
    rank: int
    steps: tuple[tuple[int, float], ...] = ()
    saves: tuple[int, ...] = ()
    """After how many steps of this attempt something was saved by `torch.save`."""
    began_s: float | None = None
    progress: str | None = None
    """What its steps were seen from: `heartbeats`, `optimizer` or `collectives`; None: nothing, or it was killed."""
    sections: tuple[str, ...] = ()
    """Those of the kind `compute` in which no collective was seen: what is compared with other ranks."""
    weights: tuple[Weight, ...] | None = None
    """Those at the end; None where there is no optimizer, or it was killed."""
    looks: tuple[StepLook, ...] = ()
    """What was seen of each step of an optimizer, in their order."""
    witnessed: tuple[WitnessedStep, ...] = ()
    """The steps of its witness ring; empty where its way in has none, or it was killed."""
    frameworks: tuple[str, ...] = ()
    """Those that it has imported."""
    adapters: tuple[str, ...] = ()
    """Those of ours that it has imported, by the names of their frameworks."""
    evaluations: tuple[tuple[str, int], ...] = ()
    """The sections of evaluations that it has entered, each with the step that it belongs to."""
    records: tuple[tuple[str, int, float], ...] = ()
    """What its framework's loop has logged: name, step and value of each."""
    inner: str | None = None
    """A section that is passed more than once in a step, as where gradients are added up within it."""


def observe(directory: str, session: WatchedSession) -> None:
    """Write down from now on what this rank does; where that cannot be written, it is said once and not done."""
    path = Path(directory) / f"attempt-{session.attempt}-rank-{session.identity.rank}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say_once("rehearsal", f"the rehearsal cannot see this rank: {error}")
        return
    writer = _TraceWriter(path, session)
    faults.observe(writer.step, writer.entered)
    faults.slow_until((path.parent / ANSWERED).exists)
    torch_saves.listen(writer.save)
    when_imported("torch.optim.optimizer", writer.hook)
    writer.looks.install()
    rehearsed_records.listen(writer.record)
    atexit.register(writer.end)


class _TraceWriter:
    def __init__(self, path: Path, session: WatchedSession) -> None:
        self._session = session
        self._path = path
        self._optimizers: dict[int, Any] = {}  # kept until the end: a script drops them on its way there
        self._evaluation: tuple[str, int] | None = None
        self._passes: dict[tuple[str, int], int] = {}
        self.looks = StepLooks(lambda look: self._write(**look.to_json()))
        self._write(began_s=time.monotonic())

    def step(self, number: int) -> None:
        self.looks.at = number
        self._write(step=number, t=time.monotonic())

    def entered(self, name: str, step: int) -> None:
        if any(part in name for part in _EVALUATIONS):
            if (name, step) != self._evaluation:
                self._evaluation = name, step
                self._write(evaluation=name, step_of=step)
        elif name in _PASSES and step == self.looks.at:
            self._passes[name, step] = self._passes.get((name, step), 0) + 1

    def _inner(self) -> str | None:
        """Return the last kind of pass that most steps have more than once."""
        found = [name for name in _PASSES
                 if 2 * sum(count > 1 for (one, _), count in self._passes.items() if one == name)
                 > sum(one == name for one, _ in self._passes)]  # fmt: skip
        return found[-1] if found else None

    def record(self, name: str, step: int, value: float) -> None:
        number = -1 if self.looks.at is None else self.looks.at
        self._write(record=name, step_of=number if step < 0 else step, value=value)

    def save(self, target: Any) -> None:
        self._write(save=torch_saves.place_of(target), t=time.monotonic())

    def hook(self, module: Any) -> None:
        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer

        module.register_optimizer_step_post_hook(after_step)

    def end(self) -> None:
        if self._session.pid != os.getpid():
            return
        weights = None
        with contextlib.suppress(Exception):  # the GPU may be gone by now; the run has ended as it should
            weights = [_measure(weight) for weight in self._weights()]
        source = _SOURCES.get(self._session.page.words[at.W_BEAT_SOURCE])
        self._write(
            progress=source,
            sections=self._sections(),
            weights=weights or None,
            witnessed=self._witnessed(),
            inner=self._inner(),
            frameworks=[name for name, modules in _FRAMEWORKS.items() if modules & sys.modules.keys()],
            adapters=[name for name in _FRAMEWORKS if f"resilience_sdk.adapters.{name}" in sys.modules],
        )

    def _witnessed(self) -> list[tuple[Any, ...]]:
        with contextlib.suppress(OSError):
            found = read_ring(read_bytes(self._session.page.path.with_suffix(SUFFIX)), "")
            if found is not None:
                return [attrs.astuple(one) for _, one in sorted(found.steps.items())]
        return []

    def _sections(self) -> list[str]:
        with contextlib.suppress(OSError):
            reader = PageReader(self._session.page.path)
            try:
                passes = reader.passes()
            finally:
                reader.close()
            return [one.name for one in passes if one.kind == "compute" and not one.is_joint]
        return []

    def _weights(self) -> Iterator[Any]:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _write(self, **facts: Any) -> None:
        if self._session.pid == os.getpid():
            # Opened each time: a script may close descriptors that are not its own.
            with contextlib.suppress(OSError), open(self._path, "ab", buffering=0, opener=plain) as file:
                file.write((json.dumps(facts) + "\n").encode())


def _measure(weight: Any) -> tuple[float, float, list[int]]:
    local = weight.detach()
    local = (local.to_local() if hasattr(local, "to_local") else local).double()
    return float(local.norm()), float(local.sum()), list(local.shape)


def read_traces(directory: Path) -> tuple[RehearsedRank, ...]:
    """Return what the ranks of one start have left, by attempt and rank; a torn line is passed over."""
    found = []
    for path in directory.glob("attempt-*-rank-*.jsonl"):
        _, attempt, _, rank = path.stem.split("-")
        found.append(_trace(int(attempt), int(rank), list(_lines(path))))
    return tuple(sorted(found, key=lambda trace: (trace.attempt, trace.rank)))


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in read_text(path, errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _trace(attempt: int, rank: int, lines: list[Mapping[str, Any]]) -> RehearsedRank:
    steps: list[tuple[int, float]] = []
    saves: list[int] = []
    looks: list[StepLook] = []
    evaluations: list[tuple[str, int]] = []
    records: list[tuple[str, int, float]] = []
    facts: dict[str, Any] = {}
    for line in lines:
        if "step" in line:
            steps.append((line["step"], line["t"]))
        elif "save" in line:
            saves.append(len(steps))
        elif "look" in line:
            looks.append(StepLook.from_json(line["look"]))
        elif "evaluation" in line:
            evaluations.append((line["evaluation"], line["step_of"]))
        elif "record" in line:
            records.append((line["record"], line["step_of"], line["value"]))
        else:
            facts.update(line)
    weights = facts.get("weights")
    return RehearsedRank(
        attempt,
        rank,
        tuple(steps),
        tuple(saves),
        facts.get("began_s"),
        facts.get("progress"),
        tuple(facts.get("sections") or ()),
        None if weights is None else tuple(Weight(norm, total, tuple(shape)) for norm, total, shape in weights),
        tuple(looks),
        tuple(WitnessedStep(*one) for one in facts.get("witnessed") or ()),
        tuple(facts.get("frameworks") or ()),
        tuple(facts.get("adapters") or ()),
        tuple(evaluations),
        tuple(records),
        facts.get("inner"),
    )
