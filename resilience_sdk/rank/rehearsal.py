"""The trace that a rank of a rehearsal leaves: its steps and what was seen in each, its saves, its weights at the end.

A rehearsal compares these with an undisturbed run's, whatever the script prints and wherever it saves. A line is
written by one `write`, so a rank that is killed leaves all that it has done.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
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
from resilience_sdk.rank import rehearsed_records, rehearsed_states
from resilience_sdk.rank.rehearsed_processes import ProcessWatch
from resilience_sdk.rank.rehearsed_steps import StepLook, StepLooks, weights_of
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.recorder.witness_ring import SUFFIX, WitnessedStep, read_ring
from resilience_sdk.system.imports import when_imported

if TYPE_CHECKING:
    from resilience_sdk.rank.session import WatchedSession

SEEN_ENOUGH = "seen-enough"
"""A file beside the traces: the script is not what it was started as, so its ranks wait for their end."""
ANSWERED = "answered"
"""A file beside the traces: what was to follow from the fault has been seen, so nothing need be slow any more."""
_SOURCES = {at.BEATS_USER: "heartbeats", at.BEATS_OPTIMIZER: "optimizer", at.BEATS_COLLECTIVES: "collectives"}

_EVALUATIONS = ("eval", "valid")
"""Parts of the names of sections in which a training is evaluated."""
_PASSES = ("fwd", "forward", "bwd", "backward")
_ADAPTERS = "resilience_sdk.adapters."
_FRAMEWORKS = ("lightning", "transformers", "deepspeed", "megatron", "accelerate")


@attrs.frozen
class Weight:
    """One weight of an optimizer, or this rank's part of it, as far as it is compared with another one."""

    norm: float
    sum: float
    shape: tuple[int, ...] = ()


@attrs.frozen
class RehearsedSave:
    """One `torch.save` of a rank."""

    after: int
    """How many steps of this attempt were done."""
    weights: tuple[tuple[float, ...], ...] = ()
    """Those of each optimizer, as a look has them; empty before its first step."""
    kinds: tuple[str, ...] = ()
    """Which states are in it, but for weights."""
    is_ours: bool = False
    """Whether it is part of a checkpoint of ours."""


@attrs.frozen
class RehearsedRank:
    """One rank in one attempt. `steps`: the number of each, as the loop counts it, and when, in monotonic seconds."""

    attempt: int
    rank: int
    steps: tuple[tuple[int, float], ...] = ()
    saves: tuple[int, ...] = ()
    """After how many steps of this attempt something was saved by `torch.save`; where the job has checkpoints of ours,
    only those: what a framework writes beside them is not resumed from."""
    began_s: float | None = None
    progress: str | None = None
    """What its steps were seen from: `heartbeats`, `optimizer` or `collectives`; None: nothing, or it was killed."""
    sections: tuple[str, ...] = ()
    """Those of the kind `compute` that most steps pass, in which no collective was seen: what ranks are compared by."""
    weights: tuple[Weight, ...] | None = None
    """Those at the end; None where there is no optimizer, or it was killed."""
    looks: tuple[StepLook, ...] = ()
    """What was seen of each step of an optimizer, in their order."""
    witnessed: tuple[WitnessedStep, ...] = ()
    """The steps of its witness ring; empty where its way in has none, or it was killed."""
    frameworks: tuple[str, ...] = ()
    """Those that it trains with, by a trainer, engine or accelerator that was made."""
    adapters: tuple[str, ...] = ()
    """Those of ours that it trains with, by the names of their frameworks."""
    evaluations: tuple[tuple[str, int], ...] = ()
    """The sections of evaluations that it has entered, each with the step that it belongs to."""
    records: tuple[tuple[str, int, float], ...] = ()
    """What its framework's loop has logged: name, step and value of each."""
    inner: str | None = None
    """A section that is passed more than once in a step, as where gradients are added up within it."""
    group: int | None = None
    """How many processes the process group had at the first step of an optimizer, or at the end where there was none;
    None: it had joined no group."""
    alone: bool = False
    """Whether it had joined none, and nothing else by which processes are joined was there."""
    saved: tuple[RehearsedSave, ...] = ()
    """The saves in `saves`, with what was in them."""
    loaded: tuple[str, ...] = ()
    """The kinds of states that were loaded before the first step."""
    names: tuple[str, ...] = ()
    """What the weights are called, in the order of `weights`; empty where that is not known."""
    started: str | None = None
    """What it started a process of its own by, before it had joined a group; None: it started none but helpers."""


def observe(directory: str, session: WatchedSession) -> None:
    """Write down from now on what this rank does; where that cannot be written, it is said once and not done."""
    if multiprocessing.parent_process() is not None:
        return  # of a rank that starts processes by itself, whose trace is another's
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
    torch_saves.look_into(writer.saving)
    rehearsed_states.watch_loads(writer.loaded)
    rehearsed_states.watch_frameworks(writer.made)
    when_imported("torch.optim.optimizer", writer.hook)
    writer.processes.install()
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
        self._steps = 0
        self._entered: dict[str, set[int]] = {}
        self._names: list[str] = []
        self._kinds: list[str] = []
        self._loaded: set[str] = set()
        self._frameworks: list[str] = []
        self._checkpoints = os.path.join(os.path.realpath(session.config.run_dir), "checkpoints", "")
        self.processes = ProcessWatch(self._write, session.identity.world_size, path.parent / SEEN_ENOUGH)
        self.looks = StepLooks(lambda look: self._write(**look.to_json()))
        self._write(began_s=time.monotonic())

    def step(self, number: int) -> None:
        self._steps += 1
        self.looks.at = number
        self._write(step=number, t=time.monotonic())

    def entered(self, name: str, step: int) -> None:
        self._entered.setdefault(name, set()).add(step)
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

    def saving(self, saved: Any) -> None:
        self._kinds = []
        with contextlib.suppress(Exception):  # of somebody's own kind: what is in it is not known
            self._kinds = rehearsed_states.kinds_of(saved)

    def save(self, target: Any) -> None:
        place = torch_saves.place_of(target)
        weights: list[tuple[float, ...]] = []
        with contextlib.suppress(Exception):  # the GPU may be gone; which save is gone on from is not known then
            weights = [weights_of(optimizer) for optimizer in self._optimizers.values()]
        is_ours = type(target).__module__.startswith("resilience_sdk.checkpoint.") or (
            place is not None and os.path.realpath(place).startswith(self._checkpoints)
        )
        self._write(save=place, t=time.monotonic(), saved_weights=weights, kinds=self._kinds, ours=is_ours)

    def made(self, framework: str) -> None:
        if framework not in self._frameworks:
            self._frameworks.append(framework)

    def loaded(self, kind: str) -> None:
        if not self._optimizers and kind not in self._loaded:
            self._loaded.add(kind)
            self._write(loaded=kind)

    def hook(self, module: Any) -> None:
        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = optimizer
                names = rehearsed_states.names_of(optimizer)
                self._names += names or [""] * sum(len(group["params"]) for group in optimizer.param_groups)

        module.register_optimizer_step_post_hook(after_step)

    def end(self) -> None:
        if self._session.pid != os.getpid():
            return
        self.processes.ended()
        weights = None
        with contextlib.suppress(Exception):  # the GPU may be gone by now; the run has ended as it should
            weights = [_measure(weight) for weight in self._weights()]
        source = _SOURCES.get(self._session.page.words[at.W_BEAT_SOURCE])
        self._write(
            progress=source,
            sections=self._sections(),
            weights=weights or None,
            names=self._names,
            witnessed=self._witnessed(),
            inner=self._inner(),
            frameworks=[*self._frameworks, *(["megatron"] if "megatron.core" in sys.modules else [])],
            # Lightning imports ours by an entry point: only one that beats is in use.
            adapters=[name for name in _FRAMEWORKS if source == "heartbeats" and f"{_ADAPTERS}{name}" in sys.modules],
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
            # Ranks are compared by what they do in each step: an evaluation now and then tells too little.
            often = {name for name, steps in self._entered.items() if 2 * len(steps) > self._steps}
            return [one.name for one in passes if one.kind == "compute" and not one.is_joint and one.name in often]
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
    if any(save.is_ours for trace in found for save in trace.saved):
        found = [_with_ours_alone(trace) for trace in found]
    return tuple(sorted(found, key=lambda trace: (trace.attempt, trace.rank)))


def _with_ours_alone(trace: RehearsedRank) -> RehearsedRank:
    saved = tuple(save for save in trace.saved if save.is_ours)
    return attrs.evolve(trace, saved=saved, saves=tuple(save.after for save in saved))


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in read_text(path, errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _trace(attempt: int, rank: int, lines: list[Mapping[str, Any]]) -> RehearsedRank:
    steps: list[tuple[int, float]] = []
    saved: list[RehearsedSave] = []
    loaded: list[str] = []
    looks: list[StepLook] = []
    evaluations: list[tuple[str, int]] = []
    records: list[tuple[str, int, float]] = []
    facts: dict[str, Any] = {}
    for line in lines:
        if "step" in line:
            if len(looks) == 1 and steps and line["step"] <= steps[-1][0]:
                # Collectives were taken for steps until the optimizer made its first one, which counts from 0.
                steps.clear()
                looks[0] = attrs.evolve(looks[0], at=None)
            steps.append((line["step"], line["t"]))
        elif "save" in line:
            weights = tuple(tuple(one) for one in line.get("saved_weights") or ())
            kinds = tuple(line.get("kinds") or ())
            saved.append(RehearsedSave(len(steps), weights, kinds, bool(line.get("ours"))))
        elif "loaded" in line:
            loaded.append(line["loaded"])
        elif "look" in line:
            looks.append(StepLook.from_json(line["look"]))
        elif "evaluation" in line:
            evaluations.append((line["evaluation"], line["step_of"]))
        elif "record" in line:
            records.append((line["record"], line["step_of"], line["value"]))
        else:
            facts.update(line)
    ends = facts.get("weights")
    return RehearsedRank(
        attempt,
        rank,
        tuple(steps),
        tuple(save.after for save in saved),
        facts.get("began_s"),
        facts.get("progress"),
        tuple(facts.get("sections") or ()),
        None if ends is None else tuple(Weight(norm, total, tuple(shape)) for norm, total, shape in ends),
        tuple(looks),
        tuple(WitnessedStep(*one) for one in facts.get("witnessed") or ()),
        tuple(facts.get("frameworks") or ()),
        tuple(facts.get("adapters") or ()),
        tuple(evaluations),
        tuple(records),
        facts.get("inner"),
        facts.get("group"),
        bool(facts.get("alone")),
        tuple(saved),
        tuple(loaded),
        tuple(facts.get("names") or ()),
        facts.get("started"),
    )
