"""The trace that a rank of a rehearsal leaves: its steps, its saves, and at its end the weights that came of them.

A rehearsal compares these with an undisturbed run's, whatever the script prints and wherever it saves. A line is
written by one `write`, so a rank that is killed leaves all that it has done.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk import faults, torch_saves
from resilience_sdk.core.console import say_once
from resilience_sdk.core.plain_file import plain, read_text
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.system.imports import when_imported

if TYPE_CHECKING:
    from resilience_sdk.rank.session import WatchedSession

ANSWERED = "answered"
"""A file beside the traces: what was to follow from the fault has been seen, so nothing need be slow any more."""
_SOURCES = {at.BEATS_USER: "heartbeats", at.BEATS_OPTIMIZER: "optimizer", at.BEATS_COLLECTIVES: "collectives"}


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


def observe(directory: str, session: WatchedSession) -> None:
    """Write down from now on what this rank does; where that cannot be written, it is said once and not done."""
    path = Path(directory) / f"attempt-{session.attempt}-rank-{session.identity.rank}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say_once("rehearsal", f"the rehearsal cannot see this rank: {error}")
        return
    writer = _TraceWriter(path, session)
    faults.observe(writer.step)
    faults.slow_until((path.parent / ANSWERED).exists)
    torch_saves.listen(writer.save)
    when_imported("torch.optim.optimizer", writer.hook)
    atexit.register(writer.end)


class _TraceWriter:
    def __init__(self, path: Path, session: WatchedSession) -> None:
        self._session = session
        self._path = path
        self._optimizers: dict[int, Any] = {}  # kept until the end: a script drops them on its way there
        self._write(began_s=time.monotonic())

    def step(self, number: int) -> None:
        self._write(step=number, t=time.monotonic())

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
        self._write(progress=source, sections=self._sections(), weights=weights or None)

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
    facts: dict[str, Any] = {}
    for line in lines:
        if "step" in line:
            steps.append((line["step"], line["t"]))
        elif "save" in line:
            saves.append(len(steps))
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
    )
