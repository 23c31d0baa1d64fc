"""The levels of units that do the same work (the ranks of a role, or their nodes), window after window, and who is out.

A level is the logarithm of how much longer a unit took than the others, see `window.level`.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Generic

import attrs

from resilience_sdk.straggler.change_point import LEAST_NOISE, find_rise, noise_of
from resilience_sdk.straggler.rules import Rules
from resilience_sdk.straggler.window import MOST_Z, NOT_SEEN, SIGMA_OF_DEVIATION, Leveled, Unit, median

_KEPT = 64  # windows, where there are few units
_KEPT_OF_MANY = 8
_MANY = 64


@attrs.frozen
class Evidence:
    """Why one unit is called slow."""

    excess: float
    """Logarithm of its ratio to the others."""
    z: float
    needed_z: float
    bound: float
    """Below this level it is normal again: half of the excess."""
    windows: int
    """Windows for which it has been slow."""
    few: bool = False


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
            if unit not in self._index:
                self._index[unit] = len(self._index)
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
        at = self._index.get(unit)
        if at is None:
            return
        for row in (*self._windows, *self._own_errors):
            if at < len(row):
                row[at] = NOT_SEEN

    def of(self, unit: Unit, last: int) -> list[float]:
        """Return a unit's levels in the last windows, oldest first, without those in which it has none."""
        at = self._index.get(unit)
        if at is None:
            return []
        rows = list(self._windows)[-last:]
        return [row[at] for row in rows if at < len(row) and row[at] == row[at]]

    def newest(self, unit: Unit) -> float:
        """Return a unit's level in the newest window; NOT_SEEN if it was not there."""
        at = self._index.get(unit)
        return self._windows[-1][at] if at is not None and self._windows and at < len(self._windows[-1]) else NOT_SEEN

    def windows_above(self, unit: Unit, bound: float) -> int:
        """Return for how many of the last windows a unit has been above `bound` without a break."""
        count = 0
        for value in reversed(self.of(unit, _KEPT)):
            if value < bound:
                break
            count += 1
        return count

    def slow(self, rules: Rules) -> dict[Unit, Evidence]:
        """Return the units that are slow by the rules, apart from what their excess means for the step."""
        if not self._windows:
            return {}
        present = sum(1 for value in self._windows[-1] if value == value)
        if present < 2:
            return {}
        if present < rules.few:
            return self._slow_among_few(rules, present)
        return self._slow_among_peers(rules, present)

    # -- many: how far out of the distribution of the others

    def _slow_among_peers(self, rules: Rules, present: int) -> dict[Unit, Evidence]:
        needed = rules.needed_z(present)
        units = list(self._index)
        found: dict[Unit, Evidence] = {}
        for span, least in rules.spans:
            if len(self._windows) < span:
                continue
            evidence = self._over(span)
            floor = math.log1p(least)
            candidates = [at for at, value in enumerate(evidence) if value >= floor and units[at] not in found]
            if not candidates:
                continue
            known = [value for value in evidence if value == value]
            middle = median(known)
            scale = max(
                SIGMA_OF_DEVIATION * median([abs(value - middle) for value in known]),
                self._noise() / math.sqrt(span) if present <= _MANY else 0.0,
                LEAST_NOISE,
            )
            for at in candidates:
                excess = evidence[at] - middle
                z = min(MOST_Z, excess / scale)
                bound = middle + 0.5 * excess
                sure = excess >= rules.own_z * self._own_error(units[at], span)
                if sure and z >= needed and excess >= floor and self.newest(units[at]) >= bound:
                    windows = max(span, self.windows_above(units[at], bound))
                    found[units[at]] = Evidence(excess, z, needed, bound, windows)
        return found

    def _over(self, span: int) -> list[float]:
        """Return each unit's level over the last `span` windows: the lesser of two, else the median.

        One lucky or one bad window of a unit does not move it. A unit needs three quarters of the windows.
        """
        size = len(self._index)
        rows = [row if len(row) == size else row + _nobody(size - len(row)) for row in list(self._windows)[-span:]]
        if span == 2:
            return [min(a, b) if a == a and b == b else NOT_SEEN for a, b in zip(*rows, strict=True)]
        complete = all(math.isfinite(sum(row)) for row in rows)
        if complete:
            low, high = (span - 1) // 2, span // 2
            return [0.5 * (ordered[low] + ordered[high]) for ordered in map(sorted, zip(*rows, strict=True))]
        merged = []
        for column in zip(*rows, strict=True):
            known = [value for value in column if value == value]
            merged.append(median(known) if 4 * len(known) >= 3 * span else NOT_SEEN)
        return merged

    def _noise(self) -> float:
        """Return how much a level varies by itself: between windows, or as its steps scatter, whichever is more."""
        errors = [error for error in self._errors if error == error]
        between = noise_of([self.of(unit, _KEPT_OF_MANY) for unit in self._index])
        return max(between, median(errors)) if errors else between

    def _own_error(self, unit: Unit, span: int) -> float:
        """Return by how much a unit's level over the last `span` windows may be off, as its own steps scatter.

        Who is slow now and then, but so that nobody can tell by how much, is not named by luck. Above all that is a
        rank whose steps are not those of the others, because it has passed the section once more or less: where the
        lengths of sequences vary, its ratios are chance.
        """
        at = self._index[unit]
        rows = list(self._own_errors)[-span:]
        errors = [row[at] for row in rows if at < len(row) and row[at] == row[at]]
        return median(errors) / math.sqrt(len(errors)) if errors else 0.0

    # -- few: ten percent, or a change of the own history

    def _slow_among_few(self, rules: Rules, present: int) -> dict[Unit, Evidence]:
        needed = rules.needed_z(present)
        noise = self._noise()
        latest = self._windows[-1]
        found: dict[Unit, Evidence] = {}
        for unit, at in self._index.items():
            if at >= len(latest) or latest[at] != latest[at]:
                continue
            series = self.of(unit, _KEPT)
            if len(series) < 2:
                continue
            excess = min(series[-2:])
            z = min(MOST_Z, excess / (noise / math.sqrt(2.0)))
            enough = needed if excess < math.log(2.0) else rules.z_of_few
            sure = excess >= rules.own_z * self._own_error(unit, 2)
            if sure and excess >= math.log1p(rules.excess_of_few) and z >= enough:
                windows = max(2, self.windows_above(unit, 0.5 * excess))
                found[unit] = Evidence(excess, z, enough, 0.5 * excess, windows, few=True)
                continue
            change = find_rise(series, noise)
            least = math.log1p(rules.change_of_few)
            if change is not None and change.z >= needed and change.rise >= least and change.after >= 0.5 * least:
                z, windows = min(MOST_Z, change.z), len(series) - change.index
                found[unit] = Evidence(change.rise, z, needed, change.middle, windows, few=True)
        return found


def _nobody(count: int) -> array[float]:
    return array("d", [NOT_SEEN]) * count
