"""Pictures over time and bars of it: the strip of attempts and buckets, curves, saves. Pure: facts become SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from resilience_sdk.report import scales
from resilience_sdk.report.facts import AttemptTimes, CheckpointFacts, CurveFacts, Pin, Segment
from resilience_sdk.report.svg import (
    AXIS,
    PIN_LETTERS,
    WIDTH,
    TimeSpan,
    digits,
    framed,
    join,
    kind_class,
    percent_at,
    pin_lines,
    plot,
    shortened,
    stretched,
    tag,
    time_axis,
    tip,
)

_PIN_APART = 0.026  # nearer than this, pins become one with a number
_PIN_LEVEL = 0.055  # nearer than this, the second stands above the first
_MOST_TOLD = 6
_ROOM_FOR_NAME = 0.2
_FLAT = 1e-3


def name_of(identifier: str) -> str:
    """Return an incident's id as the name of its place on the page."""
    return "incident-" + re.sub(r"[^A-Za-z0-9_-]", "-", identifier)[:80]


def patterns() -> Markup:
    """Return the hatchings that the style sheet fills with; they stand once in a page."""
    hatch = [
        tag(
            "pattern",
            tag("rect", width=6, height=6, class_=f"under-{name}"),
            tag("path", d="M-1 1l2-2M0 6l6-6M5 7l2-2", class_=f"over-{name}"),
            id=f"hatch-{name}",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        )
        for name in ("replayed", "standing", "restart", "idle", "evaluation", "outside", "waiting", "launcher", "none")
    ]
    return tag("svg", tag("defs", *hatch), class_="patterns", width=0, height=0, aria_hidden="true", focusable="false")


def bucket_class(bucket: str) -> str:
    """Return the class of a bucket's colour."""
    return f"b-{bucket}" if bucket.isalpha() else "b-other"


# The strip of time.


def time_strip(
    segments: Sequence[Segment],
    attempts: Sequence[AttemptTimes],
    pins: Sequence[Pin],
    span: TimeSpan,
    cards: frozenset[str],
) -> Markup:
    """Return what each second went into, pins of incidents above, attempts below; pins with a card lead to it."""
    pin_height, bar, below = 50 if pins else 4, 44, 20
    top = pin_height + bar
    # By the place among all attempts, of which these are the newest.
    first = 1 + max((one.attempt for one in segments if one.attempt is not None), default=-1) - len(attempts)
    names: dict[int | None, str] = {first + place: attempt_name(one, attempts) for place, one in enumerate(attempts)}
    bars = [
        part
        for segment in segments
        if segment.ended_at > segment.began_at
        for part in _segment(segment, names.get(segment.attempt), span, top, bar)
    ]
    return plot(
        f"Time strip: {len(attempts)} attempts over {scales.elapsed(span.seconds)}, {len(pins)} incidents and stops",
        top + below + AXIS,
        span,
        *bars,
        *(_attempt_mark(attempt, attempt_name(attempt, attempts), span, top + 3, below - 5) for attempt in attempts),
        time_axis(span, top + below - 2, top + below + 2),
        *_pins(pins, span, pin_height, bar, cards),
    )


def attempt_name(attempt: AttemptTimes, attempts: Sequence[AttemptTimes]) -> str:
    """Return what an attempt is called among those: with its job, where there are several."""
    has_several = any(one.job_number != attempt.job_number for one in attempts)
    return f"job {attempt.job_number}, attempt {attempt.attempt}" if has_several else f"attempt {attempt.attempt}"


def _segment(segment: Segment, name: str | None, span: TimeSpan, bottom: float, height: float) -> Iterable[Markup]:
    """Yield a bar for each bucket of a segment, one upon the other: their areas are the seconds of each."""
    whole = sum(segment.parts.values())
    left, right = span.share(segment.began_at), span.share(segment.ended_at)
    for bucket, seconds in segment.parts.items():
        part = height * scales.share_of(seconds, 0.0, whole)
        bottom -= part
        told = tip(
            bucket,
            scales.elapsed(seconds),
            len(segment.parts) > 1 and f"{scales.percent(scales.share_of(seconds, 0.0, whole))} of this time",
            name,
            f"from {scales.clock(segment.began_at)}",
        )
        yield tag(
            "rect", told, x=percent_at(left), width=percent_at(right - left), y=bottom, height=part,
            class_=f"segment {bucket_class(bucket)}",
        )  # fmt: skip


def _attempt_mark(attempt: AttemptTimes, name: str, span: TimeSpan, top: float, height: float) -> Markup:
    left, right = span.share(attempt.began_at), span.share(attempt.ended_at)
    # Its number alone does not say which job it belongs to.
    short = "" if "job" in name else attempt.attempt
    words = (
        [tag("text", name if right - left > _ROOM_FOR_NAME else short, x=5, y=height - 4)]
        if right - left > 0.022
        else []
    )
    told = tip(
        name,
        scales.elapsed(attempt.ended_at - attempt.began_at),
        f"up to step {attempt.steps}"
        if attempt.steps is not None
        else attempt.completed is not None and f"{attempt.completed} steps",
        attempt.lost_steps and f"{attempt.lost_steps} steps lost",
    )
    # A picture of its own cuts off what does not fit.
    return tag(
        "svg",
        told,
        tag("rect", width="100%", height=height, class_="bracket"),
        *words,
        x=percent_at(left),
        width=percent_at(right - left),
        y=top,
        height=height,
        class_="attempt-mark",
    )


def pin_keys(pins: Sequence[Pin]) -> Sequence[tuple[Markup, str]]:
    """Return the pin of each kind that there is, with the kind."""
    present = {pin.kind for pin in pins}
    return [(_pin_key(kind, letter), kind) for kind, letter in PIN_LETTERS.items() if kind in present]


def _pin_key(kind: str, letter: str) -> Markup:
    marks = tag("circle", cx=9, cy=9, r=8), tag("text", letter, x=9, y=13)
    picture = tag("g", *marks, class_=f"pin {kind_class(kind)}")
    return tag("svg", picture, class_="swatch", width=18, height=18, aria_hidden="true")


def _pins(pins: Sequence[Pin], span: TimeSpan, height: float, bar: float, cards: frozenset[str]) -> Iterable[Markup]:
    groups: list[list[Pin]] = []
    for pin in sorted(pins, key=lambda pin: (pin.at, pin.id)):
        if groups and span.share(pin.at) - span.share(groups[-1][0].at) < _PIN_APART:
            groups[-1].append(pin)
        else:
            groups.append([pin])
    before, was_raised = -1.0, False
    for group in groups:
        share = span.share(group[0].at)
        is_raised = share - before < _PIN_LEVEL and not was_raised
        before, was_raised = share, is_raised
        yield _pin(group, share, 12 if is_raised else height - 16, height + bar, cards)


def _pin(group: Sequence[Pin], share: float, centre: float, bottom: float, cards: frozenset[str]) -> Markup:
    worst = min(group, key=lambda pin: list(PIN_LETTERS).index(pin.kind) if pin.kind in PIN_LETTERS else 9)
    told = [f"{pin.id}: {pin.label}" for pin in group[:_MOST_TOLD]]
    if len(group) > _MOST_TOLD:
        told.append(f"and {len(group) - _MOST_TOLD} more")
    count = f"{len(group)} at once: " if len(group) > 1 else ""
    label = shortened(f"{count}{'; '.join(told)}, {scales.clock(group[0].at)}")
    letter = str(len(group)) if len(group) > 1 else PIN_LETTERS.get(worst.kind, "?")
    at = percent_at(share)
    # Not a title: it would count as text that is seen, beside the letter, which the name of a link has to contain.
    marks = (
        tag("line", x1=at, x2=at, y1=centre, y2=bottom, class_="stem"),
        tag("circle", cx=at, cy=centre, r=10),
        tag("text", letter, x=at, y=centre + 4, aria_hidden="true"),
    )
    classes = f"pin {kind_class(worst.kind)}"
    target = next((pin.id for pin in group if pin.id in cards), None)
    if target is None:
        return tag("g", *marks, class_=classes, tabindex=0, role="img", aria_label=label, data_tip=label)
    return tag("a", *marks, class_=classes, href=f"#{name_of(target)}", aria_label=label, data_tip=label)


# Curves.


def curve_edges(curves: Sequence[CurveFacts], *, from_zero: bool) -> tuple[float, ...]:
    """Return the ticks of an axis of values; the axis ends with them."""
    told = scales.finite(value for curve in curves for value in curve.values)
    low, most = (0.0 if from_zero else min(told), scales.upper_end(told)) if told else (0.0, 1.0)
    if abs(most - low) < _FLAT * abs(most):
        low, most = sorted((0.0, 2 * most))  # what does not change is a line in the middle, not noise from edge to edge
    return scales.ticks(low, most)


def curve_chart(
    title: str, curves: Sequence[CurveFacts], pins: Sequence[Pin], span: TimeSpan, *, from_zero: bool
) -> Markup:
    """Return lines over time with their bands; single values that would press all others flat are cut and marked."""
    height = 190.0
    told = scales.finite(value for curve in curves for value in curve.values)
    unit = curves[0].unit if curves else ""
    edges = curve_edges(curves, from_zero=from_zero)
    low, high = edges[0], edges[-1]

    def across(value: float) -> float:
        return height * (1 - scales.share_of(value, low, high))

    least, largest = min(told, default=None), max(told, default=None)
    grid = [tag("line", x1=0, x2="100%", y1=across(tick), y2=across(tick), class_="grid") for tick in edges]
    return framed(
        f"{title}: {len(told)} points, from {scales.quantity(least, unit)} to {scales.quantity(largest, unit)}",
        height,
        span,
        [(across(tick), scales.quantity(tick, unit)) for tick in edges],
        *grid,
        time_axis(span, 0, height),
        stretched(height, *(_line(curve, index, span, across) for index, curve in enumerate(curves))),
        pin_lines(pins, span, height),
        *(_cut_marks(curve, span, high) for curve in curves),
        *(_bad_marks(curve, span) for curve in curves),
        after=[_points(curve) for curve in curves],
    )


def _points(curve: CurveFacts) -> Markup:
    """Return what the script shows beside the pointer, as text in attributes."""
    first = curve.at[0] if curve.at else 0.0
    return tag(
        "i",
        class_="points",
        hidden="",
        data_name=curve.name,
        data_unit=curve.unit,
        data_first=f"{first:.3f}",
        data_at=" ".join(digits(at - first) for at in curve.at),
        data_values=" ".join(
            "-" if value is None or not math.isfinite(value) else f"{value:.4g}" for value in curve.values
        ),
        data_steps=" ".join("-" if step is None else str(step) for step in curve.steps),
    )


def _line(curve: CurveFacts, index: int, span: TimeSpan, place: Callable[[float], float]) -> Markup:
    drawn = []
    if curve.low and curve.high:
        for run in _runs(curve, curve.low, curve.high):
            there = [f"{digits(WIDTH * span.share(at))} {digits(place(high))}" for at, _, _, high in run]
            back = [f"{digits(WIDTH * span.share(at))} {digits(place(low))}" for at, _, low, _ in reversed(run)]
            drawn.append(tag("path", d=f"M{'L'.join(there + back)}Z", class_=f"band c{index % 4}"))
    for run in _runs(curve, curve.values, curve.values):
        points = [f"{digits(WIDTH * span.share(at))} {digits(place(value))}" for at, value, _, _ in run]
        # A single point has no length: its ends are round, which shows it.
        drawn.append(tag("path", d=f"M{'L'.join(points)}" + "h0" * (len(points) == 1), class_=f"line c{index % 4}"))
    return join(drawn)


def _runs(
    curve: CurveFacts, lows: Sequence[float | None], highs: Sequence[float | None]
) -> Iterable[list[tuple[float, float, float, float]]]:
    """Return the stretches of a curve between its gaps: time, value, least and most of each point."""
    run: list[tuple[float, float, float, float]] = []
    for at, value, low, high in zip(curve.at, curve.values, lows, highs, strict=False):
        known = scales.finite((at, value, low, high))
        if len(known) == 4:
            run.append((known[0], known[1], known[2], known[3]))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _cut_marks(curve: CurveFacts, span: TimeSpan, high: float) -> Markup:
    """Return an arrow at the upper edge for each point beyond it."""
    drawn = []
    for at, value, step in zip(curve.at, curve.values, curve.steps, strict=False):
        if value is not None and math.isfinite(value) and value > high:
            told = tip(scales.quantity(value, curve.unit), step is not None and f"step {step}", "beyond the axis")
            drawn.append(_glyph("▲", span.share(at), 9, "cut", told))
    return join(drawn)


def _bad_marks(curve: CurveFacts, span: TimeSpan) -> Markup:
    drawn = []
    for at, step, word in curve.not_finite:
        told = tip(f"{curve.name} is {word}", step is not None and f"step {step}", scales.clock(at))
        drawn.append(_glyph("✕", span.share(at), 22, "bad", told))
    return join(drawn)


def _glyph(letter: str, share: float, y: float, class_: str, told: Markup) -> Markup:
    return tag("text", told, letter, x=percent_at(share), y=y, class_=f"glyph {class_}")


def checkpoint_chart(checkpoints: Sequence[CheckpointFacts], pins: Sequence[Pin], span: TimeSpan) -> Markup:
    """Return how long each save took, and below it how long training stood still for it; failed ones are marked."""
    height = 120.0
    edges = scales.ticks(0.0, max(scales.finite(save.seconds for save in checkpoints), default=1.0), 4)

    def across(seconds: float | None) -> float:
        return height * (1 - scales.share_of(sum(scales.finite([seconds])), edges[0], edges[-1]))

    return framed(
        "Duration of saves over time",
        height,
        span,
        [(across(tick), scales.elapsed(tick)) for tick in edges],
        *(tag("line", x1=0, x2="100%", y1=across(tick), y2=across(tick), class_="grid") for tick in edges),
        time_axis(span, 0, height),
        pin_lines(pins, span, height),
        *(_save(save, percent_at(span.share(save.at)), across) for save in checkpoints),
    )


def _save(save: CheckpointFacts, at: str, across: Callable[[float | None], float]) -> Markup:
    told = tip(
        f"{save.outcome}, step {'unknown' if save.step is None else save.step}",
        save.seconds is not None and f"took {scales.elapsed(save.seconds)}",
        save.stall_s is not None and f"training stood still for {scales.elapsed(save.stall_s)}",
        save.why,
    )
    if save.outcome != "committed":
        mark = tag("text", "✕", x=at, y=min(across(save.seconds), across(0.0) - 4), class_="glyph bad")
        return tag("g", told, mark, class_="save")
    return tag(
        "g",
        told,
        tag("line", x1=at, x2=at, y1=across(0.0), y2=across(save.seconds), class_="lolly"),
        tag("line", x1=at, x2=at, y1=across(0.0), y2=across(save.stall_s), class_="stall"),
        tag("circle", cx=at, cy=across(save.seconds), r=4),
        class_="save",
    )


# Bars inside of table rows.


def bar(share: float, class_: str = "bar") -> Markup:
    """Return a bar of that share of its cell."""
    return tag(
        "svg",
        tag("rect", width="100%", height=12, rx=2, class_="track"),
        tag("rect", width=percent_at(scales.share_of(share, 0, 1)), height=12, rx=2, class_=class_),
        class_="inline",
        height=12,
        aria_hidden="true",
    )


def stacked(parts: Mapping[str, float]) -> Markup:
    """Return the buckets of an attempt as one bar."""
    whole = sum(max(0.0, seconds) for seconds in parts.values())
    drawn, left = [], 0.0
    for bucket, seconds in parts.items():
        width = max(0.0, seconds) / whole if whole > 0 else 0.0
        if width > 0:
            told = tip(bucket, scales.elapsed(seconds), scales.percent(width))
            drawn.append(
                tag("rect", told, x=percent_at(left), width=percent_at(width), height=12, class_=bucket_class(bucket))
            )
        left += width
    return tag("svg", *drawn, class_="inline", height=12, role="img", aria_label=_parts_in_words(parts))


def _parts_in_words(parts: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{bucket} {scales.elapsed(seconds)}" for bucket, seconds in parts.items() if seconds > 0)
        or "no time"
    )
