"""The history of units (ranks, or nodes) that do the same work, window after window. Pure.

A level is the logarithm of how much longer a unit took than the others in one window. A stall is a single pass that
takes a rank many times as long: the median over a window is made not to see it. A healthy fleet of thousands has some
all the time, so a stall is long, and in a large fleet only a rank that stalls again is named.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

import attrs

from resilience_sdk.straggler.regression import LEAST_NOISE, find_rise, noise_of
from resilience_sdk.straggler.verdicts import MOST_Z, Rules, Slowness
from resilience_sdk.straggler.windowing import NOT_SEEN, SIGMA_OF_DEVIATION, centres, median, recorded

_ASKED = 64  # units whose scatter is looked at to tell what is typical
_ERROR = 1.2533 / 1.349  # of a median in standard deviations, over the distance of the quartiles in the same

Unit = TypeVar("Unit", bound=Hashable)


@attrs.frozen
class Leveled(Generic[Unit]):
    """How long each unit took in one window, against the others."""

    levels: dict[Unit, float]  # NOT_SEEN from fewer than half of the passes
    errors: dict[Unit, float]  # standard deviation of each level, as far as the scatter of its passes tells

    @property
    def error(self) -> float:
        """That of a typical unit; NOT_SEEN if it is not known."""
        return median(islice(self.errors.values(), _ASKED)) if self.errors else NOT_SEEN


def levels_of(rows: Mapping[Unit, Sequence[float]], few: int) -> Leveled[Unit]:
    """Return the level of each row against the median of all; of fewer rows than `few`, against that of the others.

    The ratio per pass takes out what is common to all: the length of the sequences, a slow network, a busy file
    system. The median over passes takes out single slow ones. Among few, a slow one would shift the median of all,
    and of two it would be half of it; of two others the slower one counts, so that a fast one makes nobody slow.
    """
    if len(rows) < 2:
        return Leveled(dict.fromkeys(rows, 0.0), {})
    levels: dict[Unit, float] = {}
    errors: dict[Unit, float] = {}
    centre = centres(rows.values()) if len(rows) >= few else []
    for unit, row in rows.items():
        against = centre or upper_centres([other for name, other in rows.items() if name != unit])
        ratios = [value / middle for value, middle in zip(row, against, strict=True) if middle > 0.0]
        if not math.isfinite(sum(ratios)):
            ratios = recorded(ratios)
        count = len(ratios)
        if not count or 2 * count < len(row) or (middle := median(ratios)) <= 0.0:
            levels[unit] = NOT_SEEN
            continue
        ratios.sort()
        levels[unit] = math.log(middle)
        quartiles = ratios[(3 * count) // 4] - ratios[count // 4]
        errors[unit] = _ERROR * quartiles / (middle * math.sqrt(count))
    return Leveled(levels, errors)


def upper_centres(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column, of two in the middle the larger; NOT_SEEN where no row has a value."""
    columns = (sorted(recorded(column)) for column in zip(*rows, strict=True))
    return [ordered[len(ordered) // 2] if ordered else NOT_SEEN for ordered in columns]


_KEPT = 64  # windows, where there are few units
_KEPT_OF_MANY = 8
_MANY = 64


class Levels(Generic[Unit]):
    """The last levels of all units of one kind, in arrays of doubles: 16,384 ranks take a megabyte a section."""

    def __init__(self) -> None:
        """Begin with no unit; they are added as they are seen."""
        self._index: dict[Unit, int] = {}
        self._windows: deque[array[float]] = deque(maxlen=_KEPT)
        self._own_errors: deque[array[float]] = deque(maxlen=_KEPT_OF_MANY)
        self._errors: deque[float] = deque(maxlen=_KEPT_OF_MANY)

    def add(self, window: Leveled[Unit]) -> None:
        """Add one window; who is not in it has no level in it."""
        for unit in window.levels:
            self._index.setdefault(unit, len(self._index))
        self._windows.append(self._row(window.levels))
        self._own_errors.append(self._row(window.errors))
        self._errors.append(window.error)
        while len(self._index) > _MANY and len(self._windows) > _KEPT_OF_MANY:
            self._windows.popleft()

    def _row(self, values: Mapping[Unit, float]) -> array[float]:
        row = _nobody(len(self._index))
        for unit, value in values.items():
            row[self._index[unit]] = value
        return row

    def forget(self, unit: Unit) -> None:
        """Drop what is known of a unit: it runs elsewhere now, or does something else."""
        at = self._index.get(unit, math.inf)
        for row in (*self._windows, *self._own_errors):
            if at < len(row):
                row[int(at)] = NOT_SEEN

    def _of(self, unit: Unit, rows: Sequence[array[float]]) -> list[float]:
        """Return a unit's values in some windows, without those in which it has none."""
        at = self._index[unit]
        return recorded(row[at] for row in rows if at < len(row))

    def newest(self, unit: Unit) -> float:
        """Return a unit's level in the newest window; NOT_SEEN if it was not there."""
        at = self._index.get(unit)
        return self._windows[-1][at] if at is not None and self._windows and at < len(self._windows[-1]) else NOT_SEEN

    def _windows_above(self, unit: Unit, bound: float) -> int:
        """Return for how many of the last windows a unit has been above `bound` without a break."""
        count = 0
        for value in reversed(self._of(unit, self._windows)):
            if value < bound:
                break
            count += 1
        return count

    def slow(self, rules: Rules) -> dict[Unit, Slowness]:
        """Return the units that are slow by the rules, apart from what their excess means for the step."""
        present = len(recorded(self._windows[-1])) if self._windows else 0
        if present < 2:
            return {}
        return self._slow_among_few(rules, present) if present < rules.few else self._slow_among_peers(rules, present)

    # -- many: how far out of the distribution of the others

    def _slow_among_peers(self, rules: Rules, present: int) -> dict[Unit, Slowness]:
        needed = rules.needed_z(present)
        units = list(self._index)
        found: dict[Unit, Slowness] = {}
        for span, least in rules.spans:
            if len(self._windows) < span:
                continue
            levels = self._over(span)
            floor = math.log1p(least)
            candidates = [at for at, value in enumerate(levels) if value >= floor and units[at] not in found]
            if not candidates:
                continue
            known = recorded(levels)
            middle = median(known)
            scale = max(
                SIGMA_OF_DEVIATION * median([abs(value - middle) for value in known]),
                self._noise() / math.sqrt(span) if present <= _MANY else 0.0,
                LEAST_NOISE,
            )
            for at in candidates:
                unit, excess = units[at], levels[at] - middle
                z = min(MOST_Z, excess / scale)
                bound = middle + 0.5 * excess
                sure = excess >= rules.own_z * self._own_error(unit, span)
                if sure and z >= needed and excess >= floor and self.newest(unit) >= bound:
                    windows = max(span, self._windows_above(unit, bound))
                    found[unit] = Slowness(excess, z, needed, bound, windows)
        return found

    def _over(self, span: int) -> list[float]:
        """Return each unit's level over the last `span` windows: the lesser of two, else the median.

        One lucky or one bad window of a unit does not move it. A unit needs three quarters of the windows.
        """
        size = len(self._index)
        rows = [row + _nobody(size - len(row)) for row in list(self._windows)[-span:]]
        if span == 2:
            return [min(a, b) if a == a and b == b else NOT_SEEN for a, b in zip(*rows, strict=True)]
        known = map(recorded, zip(*rows, strict=True))
        return [median(levels) if 4 * len(levels) >= 3 * span else NOT_SEEN for levels in known]

    def _noise(self) -> float:
        """Return how much a level varies by itself: between windows, or as its passes scatter, whichever is more."""
        errors = recorded(self._errors)
        last = list(self._windows)[-_KEPT_OF_MANY:]
        between = noise_of([self._of(unit, last) for unit in self._index])
        return max(between, median(errors)) if errors else between

    def _own_error(self, unit: Unit, span: int) -> float:
        """Return by how much a unit's level over the last `span` windows may be off, as its own passes scatter.

        Who is slow now and then, but so that nobody can tell by how much, is not named by luck. Above all that is a
        rank whose passes are not those of the others, because it has passed the section once more or less: where the
        lengths of sequences vary, its ratios are chance.
        """
        errors = self._of(unit, list(self._own_errors)[-span:])
        return median(errors) / math.sqrt(len(errors)) if errors else 0.0

    # -- few: ten percent, or a change of the own history

    def _slow_among_few(self, rules: Rules, present: int) -> dict[Unit, Slowness]:
        needed = rules.needed_z(present)
        noise = self._noise()
        found: dict[Unit, Slowness] = {}
        for unit in self._index:
            series = self._of(unit, self._windows)
            if len(series) < 2 or self.newest(unit) != series[-1]:
                continue
            excess = min(series[-2:])
            z = min(MOST_Z, excess / (noise / math.sqrt(2.0)))
            enough = needed if excess < math.log(2.0) else rules.z_of_few
            sure = excess >= rules.own_z * self._own_error(unit, 2)
            if sure and excess >= math.log1p(rules.excess_of_few) and z >= enough:
                windows = max(2, self._windows_above(unit, 0.5 * excess))
                found[unit] = Slowness(excess, z, enough, 0.5 * excess, windows, few=True)
                continue
            change = find_rise(series, noise)
            least = math.log1p(rules.change_of_few)
            if change is not None and change.z >= needed and change.rise >= least and change.after >= 0.5 * least:
                z = min(MOST_Z, change.z)
                found[unit] = Slowness(change.rise, z, needed, change.middle, change.length, few=True)
        return found


def _nobody(count: int) -> array[float]:
    return array("d", [NOT_SEEN]) * count


class Stalls:
    """The stalls of the last windows, of those ranks that had any."""

    def __init__(self) -> None:
        """Begin at the first window."""
        self._window = 0
        self._windows_of: dict[int, list[int]] = {}  # rank -> the number of the window, for each stall

    def add(
        self, rows: Mapping[int, Sequence[float]], centre: Sequence[float], step_s: float, rules: Rules
    ) -> dict[int, tuple[Slowness, float]]:
        """Take one window; return rank -> why it is named, and how much longer than the others it took for a pass.

        `centre` is what each pass takes the others, `step_s` the time of a usual step; where that is not known, that
        of a pass stands in for it.
        """
        self._window += 1
        oldest = self._window - rules.stall_windows
        self._windows_of = {
            rank: last for rank, of in self._windows_of.items() if (last := [at for at in of if at > oldest])
        }
        known = recorded(centre)
        usual = median(known) if known else NOT_SEEN
        bounds = [middle + _patience_s(middle, usual, step_s, rules) for middle in centre]
        least = min(recorded(bounds), default=math.inf)
        needed = 1 if len(rows) <= rules.lone_stall_ranks else 2
        found = {}
        for rank, row in rows.items():
            if max(row) < least:  # a NaN in front makes this false, which only costs time
                continue
            times = [(v - mid) / (bound - mid) for v, mid, bound in zip(row, centre, bounds, strict=True) if v >= bound]
            if not times:
                continue
            stalled = self._windows_of.setdefault(rank, [])
            stalled += [self._window] * len(times)
            if len(stalled) >= needed:
                both = [(v, mid) for v, mid in zip(row, centre, strict=True) if v == v and mid == mid]
                own, others = sum(v for v, _ in both), sum(mid for _, mid in both)
                ratio = own / others if others > 0.0 else float(len(both))
                found[rank] = (
                    Slowness(math.log(ratio), rules.z * max(times), rules.z, math.inf),
                    (own - others) / len(row),
                )
        return found


def _patience_s(middle: float, usual: float, step_s: float, rules: Rules) -> float:
    """Return how much longer than `middle`, which a pass takes the others, it must take to be a stall.

    The step is longer than usual by what the others take longer than `usual` for it, and its spikes are with it.
    """
    if step_s > 0.0:
        steps_s = max(rules.stall_steps * step_s, rules.stall_own_steps * (step_s + middle - usual))
    else:
        steps_s = rules.stall_steps * middle
    return max(steps_s, rules.stall_ratio * middle, rules.stall_s)
