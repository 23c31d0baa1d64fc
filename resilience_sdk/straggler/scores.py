"""Scores from 0 to 1, as NVIDIA's resiliency extension and NeMo define them. Pure.

* relative: the fastest rank's median over the own median. 0.5 is half as fast as the fastest.
* individual: the own best median over the median now. 0.5 is half as fast as it once was.

A section's score is that of its median duration. A GPU's score is the mean over its kernels of the ratio of medians,
weighted by the total time that the rank spent in each kernel.

Two things are done differently, because there they fail (both were tried): a section or kernel that one rank lacks
leaves the scores of all others as they are, and a reference that is itself out of the ordinary, one abnormally fast
rank or one lucky report, is not one: see `reference`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence

import attrs

from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.window import SIGMA_OF_DEVIATION, median

REPORTS_REMEMBERED = 24
"""Reports (two hours, at 300 s) over which a rank's own best is taken.

A window rather than the best ever: clocks, data and batch sizes change, and what was reached under other conditions is
no measure. Rather than the warm-up: that is the slowest time of all. What lasts for longer becomes the norm here; the
verdicts keep it, see `robust`."""

_ODD = 0.7  # a reference this much faster than the middle is looked at
_ODD_DEVIATIONS = 5.0
_ONE_IN = 64  # ranks, of which one may be left out


@attrs.frozen
class Medians:
    """What a report is made of: what each rank measured since the last one."""

    sections: Mapping[str, Mapping[int, float]]
    """Section -> rank -> median duration in seconds, of sections whose time is the rank's own (no collectives)."""
    kernels: Mapping[int, Sequence[KernelTime]] = {}
    """Rank -> its kernels, without those that communicate."""
    least_excess_s: Mapping[str, float] = {}
    """Section -> from how many seconds per pass on it is a loss at all; where none is given, 0.5 ms."""


def reference(medians: Iterable[float]) -> float:
    """Return the fastest of some medians, or the next one if the fastest is out of the ordinary. Needs one.

    It is, if it takes less than 0.7 of the middle one's time *and* lies more than five standard deviations (from the
    median absolute deviation of the logarithms) from it. One value in 64 is left out so, at least one. Of two values
    nobody can tell which is the odd one.
    """
    ordered = sorted(medians)
    middle = median(ordered)
    if len(ordered) < 3 or ordered[0] >= _ODD * middle or ordered[0] <= 0.0:
        return ordered[0]
    deviation = SIGMA_OF_DEVIATION * median(abs(math.log(value / middle)) for value in ordered)
    for value in ordered[: max(1, len(ordered) // _ONE_IN)]:
        if value >= _ODD * middle or math.log(middle / value) <= _ODD_DEVIATIONS * deviation:
            return value
    return ordered[max(1, len(ordered) // _ONE_IN)]


def relative_scores(medians: Mapping[int, float]) -> dict[int, float]:
    """Return rank -> score for one section on ranks of one role; who has no duration has no score."""
    known = [value for value in medians.values() if 0.0 < value < math.inf]
    if not known:
        return {}
    best = reference(known)
    return {rank: best / v if v > best else 1.0 for rank, v in medians.items() if 0.0 < v < math.inf}


def relative_gpu_scores(kernels: Mapping[int, Sequence[KernelTime]]) -> dict[int, float]:
    """Return rank -> score of its GPU, on ranks of one role.

    A kernel counts if at least half of the ranks ran it, two at least (all of them, if there is one only). Who has
    no such kernel has no score.
    """
    times: dict[str, list[float]] = {}
    for rows in kernels.values():
        for kernel in rows:
            if kernel.median_s > 0.0:
                times.setdefault(kernel.name, []).append(kernel.median_s)
    least = min(len(kernels), max(2, (len(kernels) + 1) // 2))
    best = {name: reference(values) for name, values in times.items() if len(values) >= least}
    scores = {rank: _weighted(rows, best) for rank, rows in kernels.items()}
    return {rank: score for rank, score in scores.items() if score is not None}


class OwnHistory:
    """What each rank has reached in the last reports: the reference of the individual scores."""

    def __init__(self, reports: int = REPORTS_REMEMBERED) -> None:
        """Remember so many reports."""
        self._reports = reports
        self._sections: dict[str, dict[int, array[float]]] = {}
        self._kernels: dict[int, dict[str, array[float]]] = {}

    def scores(self, section: str, medians: Mapping[int, float]) -> dict[int, float]:
        """Remember one report of a section and return rank -> score; the first one is 1.0."""
        history = self._sections.setdefault(section, {})
        found = {}
        for rank, value in medians.items():
            if 0.0 < value < math.inf:
                past = history.get(rank)
                if past is None:
                    past = history[rank] = array("d")
                best = self._best(past, value)
                found[rank] = best / value
        return found

    def gpu_scores(self, kernels: Mapping[int, Sequence[KernelTime]]) -> dict[int, float]:
        """Remember one report of all ranks' kernels and return rank -> score of its GPU; a new kernel has 1.0."""
        found: dict[int, float] = {}
        for rank, rows in kernels.items():
            history = self._kernels.get(rank)
            if history is None:
                history = self._kernels[rank] = {}
            best = {}
            for kernel in rows:
                if kernel.median_s > 0.0:
                    past = history.get(kernel.name)
                    if past is None:
                        past = history[kernel.name] = array("d")
                    best[kernel.name] = self._best(past, kernel.median_s)
            score = _weighted(rows, best)
            if score is not None:
                found[rank] = score
        return found

    def forget(self, rank: int) -> None:
        """Drop what is known of a rank: it runs elsewhere now."""
        self._kernels.pop(rank, None)
        for history in self._sections.values():
            history.pop(rank, None)

    def _best(self, past: array[float], value: float) -> float:
        past.append(value)
        if len(past) > self._reports:
            del past[0]
        best = min(past)
        # Only a best that makes the rank look slow is worth the question whether it was luck. The oldest was not: a
        # rank that has been slow ever since is slow.
        if best >= _ODD * value or best == past[0] or reference(past) == best:
            return best
        past.remove(best)
        return min(past)


def _weighted(kernels: Sequence[KernelTime], best: Mapping[str, float]) -> float | None:
    """Return the mean of the kernels' scores, weighted by their time; None where no kernel has a reference."""
    weight = whole = 0.0
    for kernel in kernels:
        reference_s, own_s = best.get(kernel.name), kernel.median_s
        if reference_s is not None and own_s > 0.0:
            weight += kernel.total_s
            whole += kernel.total_s if own_s <= reference_s else kernel.total_s * reference_s / own_s
    return whole / weight if weight > 0.0 else None
