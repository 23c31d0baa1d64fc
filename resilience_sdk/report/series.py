"""The curves of a run: steps and losses over time, thinned to what a picture can show. Pure.

A point that stands for several has the least and the most of them as its band, so that a spike of one step in 100,000
is still to be seen. Between two attempts, and behind a hang, there is a gap.
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Sequence

import attrs

from resilience_sdk.report.digest import NO_STEP, LossRows, ProgressRows
from resilience_sdk.report.facts import CurveFacts

MOST_POINTS = 400


@attrs.frozen
class CurvePoint:
    """One point of a curve. `attempt` counts attempts, and parts of one between hangs; where it changes is a gap."""

    at: float
    step: int
    """`NO_STEP` where it is not known."""
    value: float
    low: float
    high: float
    attempt: int = 0
    weight: float = 1.0
    """How many points it stands for."""


def _lone(at: float, step: int, value: float, attempt: int) -> CurvePoint:
    return CurvePoint(at, step, value, value, value, attempt)


def attempt_at(beginnings: Sequence[float], at: float) -> int:
    """Return the place of the attempt that ran at a time; `beginnings` are sorted."""
    return max(0, bisect.bisect_right(beginnings, at) - 1)


def gaps_of(beginnings: Sequence[float], hangs: Sequence[tuple[float, float]]) -> list[float]:
    """Return where curves have gaps: at the beginnings of attempts and the ends of hangs."""
    return sorted([*beginnings, *(ended_at for _, ended_at in hangs)])


def thinned(points: Sequence[CurvePoint], most: int = MOST_POINTS) -> list[CurvePoint]:
    """Return so many points at most, in equal parts of the time in which there are any; `points` are in its order."""
    if len(points) <= most:
        return list(points)
    spans = _spans(points)
    if len(spans) > most // 2:
        return _every(points, most)
    width = max(sum(end - begin for begin, end in spans.values()) / most, 1e-9)
    while len(kept := _merged_by(points, spans, width)) > most:  # the last part of an attempt is not whole
        width *= 1.2
    return kept


def _spans(points: Sequence[CurvePoint]) -> dict[int, tuple[float, float]]:
    spans: dict[int, tuple[float, float]] = {}
    for one in points:
        begin, end = spans.get(one.attempt, (one.at, one.at))
        spans[one.attempt] = min(begin, one.at), max(end, one.at)
    return spans


def _merged_by(points: Sequence[CurvePoint], spans: dict[int, tuple[float, float]], width: float) -> list[CurvePoint]:
    groups: list[list[CurvePoint]] = []
    newest: tuple[int, int] | None = None
    for one in points:
        key = one.attempt, int((one.at - spans[one.attempt][0]) / width)
        if key != newest:
            groups.append([])
            newest = key
        groups[-1].append(one)
    return [_merged(group) for group in groups]


def _every(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """Return groups of neighbours as points, whatever their attempts: there are more attempts than points."""
    size = math.ceil(len(points) / most)
    return [_merged(points[at : at + size]) for at in range(0, len(points), size)]


def _merged(group: Sequence[CurvePoint]) -> CurvePoint:
    if len(group) == 1:
        return group[0]
    weight = sum(one.weight for one in group)
    return CurvePoint(
        at=group[-1].at,
        step=max(one.step for one in group),
        value=sum(one.value * one.weight for one in group) / weight,
        low=min(one.low for one in group),
        high=max(one.high for one in group),
        attempt=group[-1].attempt,
        weight=weight,
    )


def curve_of(
    name: str,
    unit: str,
    points: Sequence[CurvePoint],
    *,
    not_finite: Sequence[tuple[float, int | None, str]] = (),
) -> CurveFacts | None:
    """Return a curve with its gaps; None where there is no point."""
    if not points and not not_finite:
        return None
    at: list[float] = []
    steps: list[int | None] = []
    rows: list[tuple[float, float, float] | None] = []
    before: CurvePoint | None = None
    for one in points:
        if before is not None and before.attempt != one.attempt:
            at.append((before.at + one.at) / 2)
            steps.append(None)
            rows.append(None)
        at.append(one.at)
        steps.append(None if one.step == NO_STEP else one.step)
        rows.append((one.value, one.low, one.high))
        before = one
    has_band = any(row is not None and row[1] < row[2] for row in rows)
    return CurveFacts(
        name=name,
        unit=unit,
        at=tuple(at),
        steps=tuple(steps),
        values=tuple(None if row is None else row[0] for row in rows),
        low=tuple(None if row is None else row[1] for row in rows) if has_band else (),
        high=tuple(None if row is None else row[2] for row in rows) if has_band else (),
        not_finite=tuple(not_finite),
    )


def step_time_curves(
    rows: ProgressRows, beginnings: Sequence[float], hangs: Sequence[tuple[float, float]] = ()
) -> tuple[CurveFacts, ...]:
    """Return what a step took on average, and the longest one, over time; seconds.

    The band of the mean goes from the node with the least to the one with the most at that time. What a hang lasted
    is no time of a step; `hangs` are times from and to, sorted.
    """
    means: list[CurvePoint] = []
    longest: list[CurvePoint] = []
    places_of: dict[int, list[int]] = {}
    gaps = gaps_of(beginnings, hangs)
    for place, at in enumerate(rows.at):
        if not _hung(at, rows.wall_s[place], hangs):
            places_of.setdefault(attempt_at(gaps, at), []).append(place)
    for attempt, places in sorted(places_of.items()):
        for group in _at_one_time(rows, places):
            at, step = max(rows.at[i] for i in group), max(rows.steps[i] for i in group)
            of_nodes = [rows.mean_s[i] for i in group]
            most = max(rows.longest_s[i] for i in group)
            mean = sum(of_nodes) / len(of_nodes)
            means.append(CurvePoint(at, step, mean, min(of_nodes), max(of_nodes), attempt))
            longest.append(_lone(at, step, most, attempt))
    told = [curve_of("mean step", "s", thinned(means)), curve_of("longest step", "s", _highest(thinned(longest)))]
    return tuple(curve for curve in told if curve is not None)


def _highest(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return points that show the most of what they stand for, and no band."""
    return [attrs.evolve(one, value=one.high, low=one.high) for one in points]


def _hung(at: float, took_s: float, hangs: Sequence[tuple[float, float]]) -> bool:
    """Tell whether most of the time that is told of was a hang, the newest one that had begun by then."""
    place = bisect.bisect_left(hangs, (at,)) - 1
    return place >= 0 and min(at, hangs[place][1]) - max(at - took_s, hangs[place][0]) > took_s / 2


def _at_one_time(rows: ProgressRows, places: Sequence[int]) -> list[list[int]]:
    """Return the rows of an attempt in the order of time, those that all nodes told at about the same time together.

    The times are those of the node that told most often. A node's row lies nearest to one of them.
    """
    by_group: dict[int, list[int]] = {}
    for place in places:
        by_group.setdefault(rows.groups[place], []).append(place)
    if len(by_group) == 1:
        return [[place] for place in sorted(places, key=lambda place: rows.at[place])]
    times = sorted(rows.at[place] for place in max(by_group.values(), key=len))
    middles = array("d", ((a + b) / 2 for a, b in itertools.pairwise(times)))
    groups: list[list[int]] = [[] for _ in times]
    for place in places:
        groups[bisect.bisect_right(middles, rows.at[place])].append(place)
    return [group for group in groups if group]


def loss_curves(losses: LossRows, logged: LossRows, gaps: Sequence[float]) -> tuple[CurveFacts, ...]:
    """Return the loss and the norm of the gradients over time, as the ranks checked them and as they were logged.

    `gaps` are as `gaps_of` has them.
    """
    told = []
    for rows, suffix in ((losses, ""), (logged, ", logged")):
        order = sorted(range(len(rows.at)), key=lambda place: rows.at[place])
        for name, values in (("loss", rows.loss), ("grad_norm", rows.grad_norm)):
            points = [
                _lone(rows.at[i], rows.steps[i], values[i], attempt_at(gaps, rows.at[i]))
                for i in order
                if values[i] == values[i]
            ]
            bad = sorted(rows.not_finite[name], key=lambda one: one[0])
            told.append(curve_of(f"{name.replace('_', ' ')}{suffix}", "", thinned(points), not_finite=bad))
    return tuple(curve for curve in told if curve is not None)
