"""What the verdicts are made of: the durations of a few steps, of all sections on all ranks. Pure.

Only durations travel. Readings of clocks are never compared between hosts, so it does not matter how far these are
apart.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

import attrs

WINDOW_STEPS = 8
"""Steps of one window."""

COMPARED = ("compute", "io", "gpu")
"""Kinds of sections in which ranks are compared. What contains a collective takes the same time on all ranks, or less
on the slow one, and idle time is nobody's fault."""
WAITING = ("comm", "gpu_comm")
WHOLE_STEP = ("heartbeat", "pulse")

NOT_SEEN = math.nan
"""The value of a duration or level that is missing."""

MOST_Z = 99.0
"""No distance from the middle is said to be more."""
SIGMA_OF_DEVIATION = 1.4826
"""Standard deviation of a normal distribution, over its median absolute deviation."""

_ASKED = 64  # units whose scatter is looked at to tell what is typical
_ERROR = 1.2533 / 1.349  # of a median in standard deviations, over the distance of the quartiles in the same

Unit = TypeVar("Unit", bound=Hashable)


@attrs.frozen
class Place:
    """Where a rank runs. Only ranks of one role (a pipeline stage, say) do the same work and are compared."""

    node: str = ""
    role: str = ""


@attrs.frozen
class SectionWindow:
    """One section during one window."""

    name: str
    kind: str
    """`compute`, `io`, `comm`, `idle`; on the device `gpu`, `gpu_comm`; of the step as a whole `heartbeat`, `pulse`."""
    durations_s: Mapping[int, Sequence[float | None]]
    """Rank -> its duration in each step, in seconds. The n-th is of the same step on all ranks; None: not recorded."""
    amounts: Mapping[int, Sequence[float | None]] = attrs.field(factory=dict)
    """Rank -> how much work each of these steps had, where it has told that; in any unit."""


@attrs.frozen
class Window:
    """All sections during the same steps."""

    first_step: int
    sections: tuple[SectionWindow, ...]
    steps: int = WINDOW_STEPS
    """How many passes of each section it has."""
    step_time_s: float | None = None
    """Median duration of a whole step; None: to be estimated from the sections."""
    passes_per_step: float = 1.0
    """How often these sections are passed in a step of the training; all times here are those of a pass."""
    last_step: int = attrs.field()
    """The last step in it; where it is not given, each pass is a step."""

    @last_step.default
    def _each_pass_is_a_step(self) -> int:
        return self.first_step + self.steps - 1


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two in the middle. Needs one."""
    return _middle(sorted(values))


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


def recorded(row: Sequence[float | None]) -> list[float]:
    """Return the durations in a row that are such: neither missing, nor negative, nor infinite."""
    return [value for value in row if value is not None and 0.0 <= value < math.inf]


def rows_of(section: SectionWindow, steps: int) -> dict[int, list[float]]:
    """Return rank -> one value per step, NOT_SEEN where none was recorded; without ranks that recorded none."""
    rows = {}
    for rank, durations in section.durations_s.items():
        row: list[float]
        if None in durations or len(durations) != steps or not 0.0 <= min(durations) <= max(durations) < math.inf:  # type: ignore[type-var, operator]
            row = [NOT_SEEN if v is None or not 0.0 <= v < math.inf else v for v in durations[:steps]]
            row += [NOT_SEEN] * (steps - len(row))
            if all(value != value for value in row):
                continue
        else:
            row = list(durations)  # type: ignore[arg-type]
        rows[rank] = row
    return rows


def centres(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the median over rows of each column (step); NOT_SEEN where no row has a value."""
    found = []
    for column in zip(*rows, strict=True):
        ordered = sorted(column)
        if not math.isfinite(sum(ordered)):  # NaN has no order: leave it out first
            ordered = sorted(value for value in column if value == value)
        found.append(_middle(ordered) if ordered else NOT_SEEN)
    return found


@attrs.frozen
class Leveled(Generic[Unit]):
    """How long each unit took in one window, against the others."""

    levels: dict[Unit, float]
    """Logarithm of the ratio; NOT_SEEN from fewer than half of the steps."""
    errors: dict[Unit, float]
    """Standard deviation of each level as far as the scatter of its steps tells; none where there is no level."""

    @property
    def error(self) -> float:
        """That of a typical unit; NOT_SEEN if it is not known."""
        return median(islice(self.errors.values(), _ASKED)) if self.errors else NOT_SEEN


def levels_of(rows: Mapping[Unit, Sequence[float]], few: int) -> Leveled[Unit]:
    """Return the level of each row against the median of all; of fewer rows than `few`, against that of the others.

    The ratio per step takes out what is common to all: the length of the sequences, a slow network, a busy file
    system. The median over steps takes out single slow steps. Among few, a slow one would shift the median of all,
    and of two it would be half of it; of two others the slower one counts, so that a fast one makes nobody slow.
    """
    if len(rows) < 2:
        return Leveled(dict.fromkeys(rows, 0.0), {})
    levels: dict[Unit, float] = {}
    errors: dict[Unit, float] = {}
    centre = centres(rows.values()) if len(rows) >= few else []
    for unit, row in rows.items():
        against = centre or upper_centres([other for name, other in rows.items() if name != unit])
        ratios = sorted([value / middle for value, middle in zip(row, against, strict=True) if middle > 0.0])
        if not math.isfinite(sum(ratios)):
            ratios = sorted(ratio for ratio in ratios if ratio == ratio)
        count = len(ratios)
        if not count or 2 * count < len(row) or (middle := _middle(ratios)) <= 0.0:
            levels[unit] = NOT_SEEN
            continue
        levels[unit] = math.log(middle)
        quartiles = ratios[(3 * count) // 4] - ratios[count // 4]
        errors[unit] = _ERROR * quartiles / (middle * math.sqrt(count))
    return Leveled(levels, errors)


def upper_centres(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column, of two in the middle the larger; NOT_SEEN where no row has a value."""
    columns = (sorted(value for value in column if value == value) for column in zip(*rows, strict=True))
    return [ordered[len(ordered) // 2] if ordered else NOT_SEEN for ordered in columns]


def _middle(ordered: Sequence[float]) -> float:
    at = len(ordered) // 2
    return ordered[at] if len(ordered) % 2 else 0.5 * (ordered[at - 1] + ordered[at])
