"""Windows: the durations of eight passes of every section, the same passes on all ranks. Pure.

What a rank does before its first step is complete differs from rank to rank: it goes back to where an earlier attempt
was, reads data again, compiles. Those passes are left out, at least the first one of a section. Window k holds the
passes 8k to 7 + 8k behind them. Passes are cut into windows as they come, it is counted how often a section
is passed in a step, and beside a pass stands the amount of work that the training has told for it.

Only durations travel. Readings of clocks are never compared between hosts, so it does not matter how far these are
apart.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise

import attrs

from resilience_sdk.recorder.page_layout import RING_SAMPLES

WINDOW_STEPS = 8
"""Passes of one window."""

Section = tuple[str, str]
"""Name and kind."""
Row = tuple["int | None", ...]
"""One duration (ns) per pass of a window; None: not known."""
Amounts = tuple["float | None", ...]
"""One amount of work per pass of a window; None: not known."""

COMPARED = ("compute", "io", "gpu")
"""Kinds of sections in which ranks are compared. What contains a collective takes the same time on all ranks, or less
on the slow one, and idle time is nobody's fault."""
WAITING = ("comm", "gpu_comm")
WHOLE_STEP = ("heartbeat", "pulse")

NOT_SEEN = math.nan
"""The value of a duration or level that is missing."""
SIGMA_OF_DEVIATION = 1.4826
"""Standard deviation of a normal distribution, over its median absolute deviation."""


@attrs.frozen
class RankPlace:
    """Where a rank runs. Only ranks of one role (a pipeline stage, say) do the same work and are compared."""

    node: str = ""
    role: str = ""


@attrs.frozen
class SectionWindow:
    """One section during one window.

    The n-th duration (seconds; NOT_SEEN: not recorded) is of the same pass on all ranks. `amounts` has how much work
    each pass had on the ranks that have told it, in any unit. A section that is joint holds collectives, whatever its
    kind: then who waits for others takes as long as these, or longer.
    """

    name: str
    kind: str  # `compute`, `io`, `comm`, `idle`; on the device `gpu`, `gpu_comm`; the step itself: `heartbeat`, `pulse`
    durations_s: Mapping[int, Sequence[float]]
    amounts: Mapping[int, Sequence[float]] = attrs.field(factory=dict)
    is_joint: bool = False


@attrs.frozen
class Window:
    """Sections during the same passes; all times are those of a pass."""

    first_step: int
    sections: tuple[SectionWindow, ...]
    step_time_s: float | None = None  # median duration of a pass of the whole; None: to be estimated from the sections
    passes_per_step: float = 1.0
    last_step: int = attrs.Factory(lambda self: self.first_step + WINDOW_STEPS - 1, takes_self=True)


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two in the middle. Needs one."""
    ordered = sorted(values)
    at = len(ordered) // 2
    return ordered[at] if len(ordered) % 2 else 0.5 * (ordered[at - 1] + ordered[at])


def recorded(row: Iterable[float]) -> list[float]:
    """Return the values that are not missing."""
    return [value for value in row if value == value]


def centres(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the median over rows of each column (pass); NOT_SEEN where no row has a value."""
    columns = zip(*rows, strict=True)
    # NaN has no order: it is left out first.
    known = (column if math.isfinite(sum(column)) else recorded(column) for column in columns)
    return [median(column) if column else NOT_SEEN for column in known]


def step_time(window: Window) -> float:
    """Return the median duration of a step in seconds, 0.0 when nothing tells it.

    That is the median of the heartbeat over steps and ranks, else the sum of the medians of the sections.
    """
    if window.step_time_s is not None:
        return window.step_time_s
    whole = [typical_s(section) for section in window.sections if section.kind in WHOLE_STEP]
    return max(whole) if whole else sum(typical_s(s) for s in window.sections if s.kind in COMPARED + WAITING)


def typical_s(section: SectionWindow) -> float:
    """Return the median over ranks of each rank's median duration, in seconds; 0.0 without any.

    Of many ranks about a hundred are asked: the share of the step need not be exact.
    """
    rows = islice(section.durations_s.values(), 0, None, 1 + len(section.durations_s) // 128)
    levels = [median(present) for row in rows if (present := recorded(row))]
    return median(levels) if levels else 0.0


# -- cutting

_WARM_UP = 1
_LEAST = WINDOW_STEPS // 2  # passes that a window must have


def first_pass(index: int, before: int = 0) -> int:
    """Return the number of the first pass of a window; `before` passes came before the first step was complete."""
    return max(_WARM_UP, before) + WINDOW_STEPS * index


class RankCutter:
    """Cuts the passes of one rank."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._open: dict[Section, tuple[int, list[int | None]]] = {}  # the window that fills: its number and values
        self._lanes: dict[Section, int] = {}
        self._before: dict[Section, int] = {}
        self.passes: dict[Section, int] = {}
        """How many passes each section has completed."""

    def add(
        self, section: Section, lane: int, start: int, durations_ns: Sequence[int], every: int = 1, before: int = 0
    ) -> list[tuple[int, Row]]:
        """Take passes from number `start` on; return the windows that they fill, with their numbers.

        Of these only those whose number `every` divides. The first `before` passes are left out. Where that number
        changes (what looked like a step was none) windows are counted anew.

        Where passes are missing (the ring of the page was overwritten) so are their values; a window that lacks more
        than half is left out. Of a section that runs in several threads, the first one counts.
        """
        if self._lanes.setdefault(section, lane) != lane:
            return []
        self.passes[section] = start + len(durations_ns)
        if self._before.setdefault(section, before) != before:
            self._before[section] = before
            self._open.pop(section, None)
        index, values = self._open.get(section, (0, []))
        filled: list[tuple[int, list[int | None]]] = []
        awaited = WINDOW_STEPS * index + len(values)
        first = first_pass(0, before)
        number = max(start - first, awaited)
        if number > awaited:
            later, column = divmod(number, WINDOW_STEPS)
            if later > index:
                filled.append((index, values + [None] * (WINDOW_STEPS - len(values))))
                index, values = later, []
            values = values + [None] * (column - len(values))
        values = [*values, *durations_ns[number - (start - first) :]]
        while len(values) >= WINDOW_STEPS:
            filled.append((index, values[:WINDOW_STEPS]))
            index, values = index + 1, values[WINDOW_STEPS:]
        self._open[section] = index, values
        return [(at, tuple(row)) for at, row in filled if at % every == 0 and row.count(None) <= WINDOW_STEPS - _LEAST]

    def first_pass(self, section: Section, index: int) -> int:
        """Return the number of the first pass of a window, since the rank began."""
        return first_pass(index, self._before.get(section, 0))


# -- counting

_LEAST_STEPS = 32  # of one measurement: counts are of some moment within a step, so they may be off by one
_MEASURED = 4  # counts that are kept; the median of the rates between them is not moved by one pause


def passes_per_step(passes: int, steps: int) -> float:
    """Return how often a section is passed in a step: a whole number, or one over a whole number, if it may be.

    Both counts are of one moment somewhere within a step, so they may be wrong by one.
    """
    if passes <= 0 or steps <= 0:
        return 1.0
    often, seldom = round(passes / steps), round(steps / passes)
    if often and abs(passes - often * steps) <= often + 1:
        return float(often)
    if seldom and abs(steps - seldom * passes) <= seldom + 1:
        return 1.0 / seldom
    return passes / steps


class PassRate:
    """Counts of one section on one rank, beside those of its steps.

    A rate of long ago says nothing about now: a section may begin in a later phase of a program, micro-batches may
    become more. So it is taken from what was counted lately.
    """

    def __init__(self, passes: int, steps: int) -> None:
        """Begin with the counts of the moment when it was seen first."""
        self._began = self._now = passes, steps
        self._is_fresh = True
        self._marks: deque[tuple[int, int]] = deque(maxlen=_MEASURED)
        self.often = 1.0
        """How often it is passed in a step."""

    def note(self, passes: int, steps: int) -> None:
        """Take the counts of this moment; steps may begin anew, when another heartbeat tells them."""
        if passes == self._now[0]:
            return
        if passes < self._now[0] or steps < self._now[1]:
            self._began = passes, steps
            self._marks.clear()
        if self._is_fresh and passes == self._began[0] + 1:
            self._began = passes, steps  # of a rare section the time between passes counts, not that before the first
        self._is_fresh = False
        self._now = passes, steps
        last = self._marks[-1] if self._marks else self._began
        if passes - last[0] >= WINDOW_STEPS and steps - last[1] >= _LEAST_STEPS:
            if not self._marks:
                self._marks.append(self._began)
            self._marks.append(self._now)
            self.often = median(passes_per_step(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self._marks))
        elif not self._marks:
            self.often = passes_per_step(passes - self._began[0], steps - self._began[1])

    def step_of(self, number: int) -> int:
        """Return in which step the pass of that number was, as the rank counts its steps, from 0."""
        passes, steps = self._now
        if abs(passes - self.often * steps) <= self.often + 1.0:  # so it has been since the rank began
            return int(number / self.often)
        return max(0, steps - int((passes - number) / self.often))


_KEPT = 2 * RING_SAMPLES
_SLACK = 2  # the page is read in the midst of a step


class ToldWork:
    """The amounts of work that one rank has told.

    It tells them in two rows: one amount with each call, and one with each step, the sum of its calls. Whichever is as
    long as what the rank has passed of a section, tells of its passes. Neither is, where a section is passed at times
    only, or began later than the telling: then nothing is known of its work.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rows: dict[str, tuple[int, list[float]]] = {}  # name -> how many were told, and the last of them

    def add(self, name: str, start: int, words: Sequence[int]) -> None:
        """Take new words of a row of the page; `start` is the number of the first since the rank began."""
        count = len(words)
        amounts = struct.unpack(f"={count}d", struct.pack(f"={count}Q", *words))
        end, known = self._rows.get(name, (start, []))
        self._rows[name] = start + count, [*(known if end == start else ()), *amounts][-_KEPT:]

    def of(self, first: int, passes: int) -> Amounts | None:
        """Return the amounts of a window of a section; None: unknown.

        `first` is the number of its first pass, `passes` how often the section was passed up to now.
        """
        if not self._rows:
            return None
        end, values = min(self._rows.values(), key=lambda row: abs(row[0] - passes))
        fewest = min(told for told, _ in self._rows.values())
        a_step = -(-end // max(1, fewest))  # so many may be told at once, before the first of them is passed
        if abs(end - passes) > _SLACK + a_step:
            return None
        first -= end - len(values)
        places = range(first, first + WINDOW_STEPS)
        amounts = tuple(values[at] if 0 <= at < len(values) and values[at] > 0.0 else None for at in places)
        return amounts if WINDOW_STEPS - amounts.count(None) >= _LEAST else None
