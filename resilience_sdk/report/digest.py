"""The digest of a journal: one pass over its files that keeps rare events whole, and of frequent ones their numbers.

A fleet of 512 nodes tells some hundred times in an attempt what each of its ranks took of a step. As events that is
gigabytes; as numbers in arrays it is some megabytes. So `progress`, `loss` and logged `metrics` become rows, of
`step_time`, `memory` and `progress` each file's newest one in an attempt stays an event (they tell sums, or where a run
had come to), so do some of `time_spent` (sums as well) over an attempt, and all else is kept and sorted by time, for
whoever follows a run through its events.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.console import doing
from resilience_sdk.core.journal import Event, parse_lines
from resilience_sdk.core.plain_file import open_to_read

NAN = math.nan
NO_STEP = -1
_BLOCK = 1 << 22
_MOST_LINE = 1 << 24  # bytes; a longer line is none of ours
_MOST_STEP = 1 << 62
_MOST_NUMBER = 1e15
_MOST_RANKS = 1 << 17  # in a run
_MOST_GROUP = 1 << 12  # on a node
_LOSSES = ("loss", "train_loss", "train/loss", "training_loss")
_NORMS = ("grad_norm", "train/grad_norm")
_SHARED = frozenset({"event", "host", "boot_id", "job", "what", "check", "status", "why"})
_MOST_SHARED = 200
_MOST_POINTS, _LEAST_POINTS, _POINTS_OF_ALL = 128, 8, 8192
"""Of `time_spent`: in an attempt on a node, and over all files."""


@attrs.define
class ProgressRows:
    """What `progress` events tell, one row each, in the order of files. Times are seconds, own times milliseconds."""

    at: array[float] = attrs.field(factory=lambda: array("d"))
    wall_s: array[float] = attrs.field(factory=lambda: array("d"))
    mean_s: array[float] = attrs.field(factory=lambda: array("f"))
    longest_s: array[float] = attrs.field(factory=lambda: array("f"))
    steps: array[int] = attrs.field(factory=lambda: array("q"))
    """The newest step, `NO_STEP` where it is not told."""
    groups: array[int] = attrs.field(factory=lambda: array("l"))
    """Of each row the place in `ranks_of` of the ranks that it tells of."""
    offsets: array[int] = attrs.field(factory=lambda: array("q"))
    """Where its ranks' times begin in `own_ms`."""
    own_ms: array[float] = attrs.field(factory=lambda: array("f"))
    """NaN where a rank told nothing."""
    ranks_of: list[tuple[int, ...]] = attrs.field(factory=list)
    node_of: dict[int, str] = attrs.field(factory=dict)
    """Rank -> the node that told of it."""
    _known: dict[tuple[tuple[int, ...], str], int] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.at)

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take an event; False where it cannot be understood."""
        wall_s, mean_ms = number(event.get("wall_s")), number(event.get("mean_ms"))
        if wall_s is None or mean_ms is None or wall_s < 0 or mean_ms <= 0:
            return False
        longest_ms = number(event.get("longest_ms"))
        group, own = self._group(event.get("ranks"), event.get("host")), event.get("own_ms")
        if group is None:
            return False
        offset = len(self.own_ms)
        self.own_ms.extend(_times(own, len(self.ranks_of[group])))
        self.at.append(float(event["t"]))
        self.wall_s.append(wall_s)
        self.mean_s.append(mean_ms / 1000)
        self.longest_s.append(max(mean_ms, longest_ms or 0.0) / 1000)
        self.steps.append(step_of(event))
        self.groups.append(group)
        self.offsets.append(offset)
        return True

    def _group(self, ranks: Any, host: Any) -> int | None:
        if not isinstance(ranks, list) or not 0 < len(ranks) <= _MOST_GROUP:
            return None
        node = host if isinstance(host, str) else ""
        try:
            key = tuple(ranks), node
            known = self._known.get(key)
        except TypeError:  # a list among them
            return None
        if known is not None:
            return known
        if not all(type(rank) is int and 0 <= rank < 1 << 31 for rank in ranks) or len(set(ranks)) < len(ranks):
            return None
        if len(self.node_of) + len(ranks) > _MOST_RANKS:
            return None
        self._known[key] = len(self.ranks_of)
        self.ranks_of.append(key[0])
        self.node_of.update(dict.fromkeys(key[0], node))
        return self._known[key]


@attrs.define
class LossRows:
    """Values of the loss and of the norm of the gradients; NaN where one is not told, or is no finite number."""

    at: array[float] = attrs.field(factory=lambda: array("d"))
    steps: array[int] = attrs.field(factory=lambda: array("q"))
    loss: array[float] = attrs.field(factory=lambda: array("d"))
    grad_norm: array[float] = attrs.field(factory=lambda: array("d"))
    not_finite: dict[str, list[tuple[float, int | None, str]]] = attrs.field(
        factory=lambda: {"loss": [], "grad_norm": []}
    )
    """By name: time, step and text of values that are none. The first hundred."""

    def add(self, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Take an event with its values."""
        loss = next((values[name] for name in _LOSSES if name in values), None)
        norm = next((values[name] for name in _NORMS if name in values), None)
        if loss is None and norm is None:
            return
        self.at.append(float(event["t"]))
        self.steps.append(step_of(event))
        for name, value, told in (("loss", loss, self.loss), ("grad_norm", norm, self.grad_norm)):
            finite = number(value)
            told.append(NAN if finite is None else finite)
            if finite is None and (text := _not_finite(value)) is not None:
                self.note(name, event, text)

    def note(self, name: str, event: Mapping[str, Any], text: str) -> None:
        """Note a value that cannot be drawn."""
        step = step_of(event)
        if len(self.not_finite[name]) < _MOST_NOT_FINITE:
            self.not_finite[name].append((float(event["t"]), None if step == NO_STEP else step, text))


_MOST_NOT_FINITE = 100


@attrs.frozen
class JournalDigest:
    """What one pass over a journal has kept."""

    events: tuple[dict[str, Any], ...]
    """By time; of `progress` and `step_time` the newest ones, of `loss` and logged `metrics` none."""
    count: int
    """Of all events."""
    progress: ProgressRows
    losses: LossRows
    """What ranks 0 checked."""
    logged: LossRows
    """What their program logged through an adapter."""
    torn_lines: int
    unreadable_files: tuple[str, ...]
    misshapen: int = 0
    """Events of which nothing could be understood but their name."""


def read_digest(directory: Path) -> JournalDigest:
    """Read every file of a journal directory once; torn lines and unreadable files are counted, never fatal.

    Raises OSError where the directory cannot be listed: a glob over such a one is silently empty.
    """
    unreadable: list[str] = []
    names = sorted(name for name in os.listdir(directory) if name.endswith(".jsonl"))
    reading = _DigestReading(max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_ALL // max(1, len(names)))))
    for place, name in enumerate(names):
        doing("reading the journal: file", place + 1, len(names))
        try:
            for block in _blocks(directory / name):
                reading.take(block)
        except OSError as error:
            unreadable.append(f"{name}: {error.strerror}")
        reading.end_file()
    events = reading.events
    events.sort(key=lambda event: float(event["t"]))
    return JournalDigest(
        events=tuple(events),
        count=reading.count,
        progress=reading.progress,
        losses=reading.losses,
        logged=reading.logged,
        torn_lines=reading.torn,
        unreadable_files=tuple(unreadable),
        misshapen=reading.misshapen,
    )


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file in parts of bounded size."""
    rest = b""
    with open_to_read(path) as file:
        while block := file.read(_BLOCK):
            data = rest + block
            cut = data.rfind(b"\n") + 1
            if cut:
                yield data[:cut]
            rest = data[cut:] if len(data) - cut <= _MOST_LINE else b"{"  # counts as a torn line
    if rest:
        yield rest


class _DigestReading:
    """A journal that is being read."""

    def __init__(self, most_points: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._most_points = most_points
        self._points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self.count = self.torn = self.misshapen = 0
        self.progress, self.losses, self.logged = ProgressRows(), LossRows(), LossRows()
        self._newest: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._texts: dict[str, str] = {}

    def take(self, lines: bytes) -> None:
        """Take some lines of one file."""
        add, newest, names = self.progress.add, self._newest, _REDUCED
        for event in parse_lines(lines):
            if event is None:
                self.torn += 1
                continue
            self.count += 1
            name = event["event"]
            if name not in names:
                self.events.append(self._slim(event))
            elif name == _PROGRESS:
                self.misshapen += not add(event)
                newest[name, str(event.get("job")), str(event.get("attempt"))] = event
            elif name in (_STEP_TIME, _MEMORY):
                newest[name, str(event.get("job")), str(event.get("attempt"))] = event
            elif name == _TIME_SPENT:
                self._take_point(event)
            elif event.get("rank") in (0, None):
                self._take_values(event)

    def end_file(self) -> None:
        """Keep what this file told last."""
        self.events += map(self._slim, self._newest.values())
        self._newest.clear()
        self.events += (point for points in self._points.values() for point in points)
        self._points.clear()

    def _take_point(self, event: dict[str, Any]) -> None:
        """Keep it, and of too many each second one and the newest."""
        points = self._points.setdefault((str(event.get("job")), str(event.get("attempt"))), [])
        points.append(self._slim(event))
        if len(points) > self._most_points:
            points[:-2] = points[:-2:2]

    def _take_values(self, event: Mapping[str, Any]) -> None:
        if event["event"] == Event.LOSS.value:
            self.losses.add(event, event)
        elif isinstance(values := event.get("values"), dict):
            self.logged.add(event, values)

    def _slim(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event that shares its keys, and the texts that many have, with the others."""
        texts = self._texts
        for key in _SHARED & event.keys():
            value = event[key]
            if isinstance(value, str) and len(value) <= _MOST_SHARED:
                event[key] = texts.setdefault(value, value)
        return {sys.intern(key): value for key, value in event.items()}


_PROGRESS, _STEP_TIME, _TIME_SPENT = Event.PROGRESS.value, Event.STEP_TIME.value, Event.TIME_SPENT.value
_MEMORY = Event.MEMORY.value
_REDUCED = frozenset({_PROGRESS, _STEP_TIME, _TIME_SPENT, _MEMORY, Event.LOSS.value, Event.METRICS.value})


def number(value: object) -> float | None:
    """Return a finite number of a size that can be drawn, None for anything else."""
    if type(value) is float:
        return value if -_MOST_NUMBER < value < _MOST_NUMBER else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -_MOST_NUMBER < value < _MOST_NUMBER else None


def step_of(event: Mapping[str, Any]) -> int:
    """Return the step of an event, `NO_STEP` where it has none."""
    step = event.get("step")
    return step if type(step) is int and 0 <= step < _MOST_STEP else NO_STEP


def _not_finite(value: object) -> str | None:
    """Return a value that is a number but not finite as text; `loss` events have it as text already."""
    if isinstance(value, (str, float)):
        with contextlib.suppress(ValueError):
            found = float(value)
            return None if math.isfinite(found) else repr(found)
    return None


def _times(own: Any, count: int) -> Sequence[float]:
    """Return a time for each rank, NaN where it told none."""
    if not isinstance(own, list) or len(own) != count:
        return [NAN] * count
    with contextlib.suppress(TypeError):  # None among them
        if min(own) >= 0 and sum(own) < _MOST_NUMBER:  # as nearly always; no sum with a NaN is less
            return own
    return [NAN if (one := number(value)) is None or one < 0 else one for value in own]
