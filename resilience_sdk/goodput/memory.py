"""The memory of a run's ranks: how much each had at most, whether it grows with the steps, and when none is left. Pure.

The monitors journal `memory` events (bytes, of host and device); who reports asks here for the newest ones and for
words. Growth is reported where it goes on: what fills a cache, warms up or is read in levels off, and is none.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.words import MIB, size

_MOST_POINTS = 64
_LEAST_POINTS, _LEAST_OF_PART = 16, 2
_WARM_UP = 0.25  # of the steps: allocators, caches and the first batches of each worker
_PARTS = 3
_GOES_ON = 0.75  # of the growth before, for one that does not level off
_LEAST_BYTES, _LEAST_SHARE = 16 * MIB, 0.01  # that it has grown by, beyond what allocators give and take
_BEYOND_CHANCE = 2.0  # times what comes and goes beside it
_MOST_STEPS = 10_000_000  # until the memory is full: a growth that nobody will live to see is none
_MOST_NAMED = 2
_ROUNDED = 2  # digits


@attrs.define
class MemorySamples:
    """How much memory one rank had after which step, thinned to some dozens of points. Bytes."""

    points: list[tuple[int, int]] = attrs.field(factory=list)
    _apart: int = 1

    def add(self, step: int, amount: int) -> None:
        """Take a sample; a step that went back (a rollback) begins anew."""
        if self.points and step < self.points[-1][0]:
            self.points, self._apart = [], 1
        if self.points and step - self.points[-1][0] < self._apart:
            return
        self.points.append((step, amount))
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[-1::-2][::-1]
            self._apart = max(2 * self._apart, self.points[1][0] - self.points[0][0])

    @property
    def growth(self) -> float | None:
        """Bytes that it grows by in a step; None where it does not, levels off, or too little is known."""
        return growth_of(self.points)


def growth_of(points: Sequence[tuple[int, int]]) -> float | None:
    """Return the growth in bytes per step of `(step, bytes)` in the order of steps; None where there is none to report.

    What comes behind the warm-up is cut into three parts of equal length. The least of each part counts, so that what
    is taken and given back is no growth: it has to rise from part to part, by about as much the second time, and by
    more than comes and goes within a part. The value is the median slope between the parts' points (Theil and Sen).
    """
    parts = _parts(points)
    if len(points) < _LEAST_POINTS or any(len(part) < _LEAST_OF_PART for part in parts):
        return None
    least = [min(part, key=lambda point: point[1]) for part in parts]
    before, behind = (_slope(*pair) for pair in itertools.pairwise(least))
    grown = (least[-1][1] - least[0][1]) * _PARTS / (_PARTS - 1)  # over the parts, not from one's least to another's
    if grown < max(_LEAST_BYTES, _LEAST_SHARE * least[-1][1]) or before <= 0 or behind < _GOES_ON * before:
        return None
    rate = statistics.median(_slope(*pair) for pair in itertools.combinations(itertools.chain(*parts), 2))
    swings = ([amount - rate * step for step, amount in part] for part in parts)
    return rate if grown > _BEYOND_CHANCE * max(max(swing) - min(swing) for swing in swings) else None


def _parts(points: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the points behind the warm-up in parts of equally many steps; empty ones where there are too few steps."""
    parts: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]
    first, last = (points[0][0], points[-1][0]) if points else (0, 0)
    begin = first + _WARM_UP * (last - first)
    for step, amount in points if last > first else ():
        if step >= begin:
            parts[min(_PARTS - 1, int(_PARTS * (step - begin) / (last - begin)))].append((step, amount))
    return parts


def _slope(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


@attrs.frozen
class RankMemory:
    """The memory of one rank in bytes: what it had when its node last said so, and the most that it ever had.

    Of the host it is what is resident; of the device what torch's allocator has handed out there. None: not known, as
    of a rank that has no device.
    """

    rank: int
    host: int | None = None
    host_peak: int | None = None
    host_growth: float | None = None
    """Bytes that it grows by in a step, of memory that is no file's; None where it does not grow, or levels off."""
    device: int | None = None
    device_peak: int | None = None
    device_total: int | None = None
    device_growth: float | None = None
    steps_left: int | None = None
    """After about how many steps the memory that grows is full, if all ranks go on as they do."""

    def words(self) -> str:
        """Return how much it has, as a person reads it; empty where nothing is known."""
        parts = []
        if self.host is not None:
            parts.append(f"{size(self.host)} (peak {size(self.host_peak or self.host)})")
        if self.device is not None:
            of = "" if self.device_total is None else f" of {size(self.device_total)}"
            parts.append(f"{size(self.device)} on its device (peak {size(self.device_peak or self.device)}{of})")
        return ", ".join(parts)

    def growth_words(self) -> str | None:
        """Return that it grows, and how long that can go on; None where it does not grow."""
        grows = [
            f"{size(growth)} a step{where}"
            for growth, where in ((self.host_growth, ""), (self.device_growth, " on its device"))
            if growth is not None
        ]
        if not grows:
            return None
        full = "" if self.steps_left is None else f": full in about {_rounded(self.steps_left):,} steps"
        return f"rank {self.rank} grows {' and '.join(grows)}{full}"


def memory_of(events: Iterable[Mapping[str, Any]]) -> tuple[RankMemory, ...]:
    """Return the memory of each rank of the newest attempt, by rank, as its node said last; empty: nobody has said."""
    newest: dict[tuple[Any, Any], dict[str, Mapping[str, Any]]] = {}
    last: tuple[Any, Any] | None = None
    for event in events:
        name = event.get("event")
        if name == Event.MEMORY.value:
            last = event.get("job"), event.get("attempt")
            newest.setdefault(last, {})[str(event.get("host"))] = event
        elif name == Event.RUN_START.value:
            last = None
    told = (newest[last] if last is not None else {}).values()
    found = {one.rank: one for event in told for one in ranks_of(event)}
    return tuple(found[rank] for rank in sorted(found))


def ranks_of(event: Mapping[str, Any]) -> list[RankMemory]:
    """Return the ranks of one `memory` event, with when their memory is full; what is misshapen is left out."""
    ranks, left = event.get("ranks"), event.get("left")
    known = [one for one in map(_rank_of, ranks if isinstance(ranks, list) else ()) if one is not None]
    together = sum(one.host_growth or 0.0 for one in known)
    return [attrs.evolve(one, steps_left=_steps_left(one, left, together)) for one in known]


def growing_words(ranks: Iterable[RankMemory]) -> list[str]:
    """Return a sentence for each of those whose memory is full first, and how many more grow."""
    growing = [one for one in ranks if one.growth_words() is not None]
    growing.sort(key=lambda one: math.inf if one.steps_left is None else one.steps_left)
    words = [str(one.growth_words()) for one in growing[:_MOST_NAMED]]
    more = len(growing) - len(words)
    return [*words[:-1], f"{words[-1]}; {more} more grow as well"] if more else words


_COUNTS = ("host", "host_peak", "device", "device_peak", "device_total")
_GROWTHS = ("host_growth", "device_growth")


def _rank_of(told: Any) -> RankMemory | None:
    if not isinstance(told, dict) or type(told.get("rank")) is not int:
        return None
    counts = {name: told[name] for name in _COUNTS if type(told.get(name)) is int and told[name] >= 0}
    rates = {
        name: told[name] for name in _GROWTHS if type(told.get(name)) in (int, float) and 0 < told[name] < math.inf
    }
    known: dict[str, Any] = {**counts, **rates}
    return RankMemory(told["rank"], **known)


def _steps_left(one: RankMemory, left: Any, together: float) -> int | None:
    """Return the steps until what grows first is full; the ranks of a node take the memory of the host together."""
    ends = []
    if one.host_growth is not None and type(left) is int and left >= 0:
        ends.append(left / together)
    if one.device_growth is not None and one.device_total is not None and one.device is not None:
        ends.append(max(0, one.device_total - one.device) / one.device_growth)
    steps = min(ends, default=math.inf)
    return int(steps) if steps <= _MOST_STEPS else None


def _rounded(count: int) -> int:
    """Return a count in two digits: it is an estimate."""
    digits = max(0, len(str(count)) - _ROUNDED)
    return round(count, -digits)
