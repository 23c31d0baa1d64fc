"""Pictures that compare ranks: the map over time, scores of stragglers, shares of a step over the ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup

from resilience_sdk.report import scales
from resilience_sdk.report.facts import HeatMap, Pin, ScoreFacts
from resilience_sdk.report.svg import (
    WIDTH,
    TimeSpan,
    digits,
    framed,
    percent_at,
    pin_lines,
    stretched,
    swatch,
    tag,
    time_axis,
    tip,
)

_MAP_HEIGHT = 640
HEAT_STEPS = (0.9, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Between the classes of a heat map: as the others from the first to the second, slower from there on."""


def share_with_range(mean: float, least: float, most: float) -> Markup:
    """Return a share of a step as a bar, with its range over the ranks as a whisker; a whole step fills the cell."""
    mean, least, most = (scales.share_of(value, 0, 1) for value in (mean, least, most))
    return tag(
        "svg",
        tag("rect", y=2, width="100%", height=12, rx=2, class_="track"),
        tag("rect", y=2, width=percent_at(mean), height=12, rx=2, class_="bar"),
        tag("line", x1=percent_at(least), x2=percent_at(most), y1=8, y2=8, class_="whisker"),
        *(tag("line", x1=percent_at(end), x2=percent_at(end), y1=4, y2=12, class_="whisker") for end in (least, most)),
        class_="inline",
        height=16,
        aria_hidden="true",
    )


def score_range(score: ScoreFacts, threshold: float | None) -> Markup:
    """Return one kind of scores from 0 to 1: all ranks as a bar, the median as a line, the worst as points."""
    least, median, most = (scales.share_of(value, 0, 1) for value in (score.least, score.median, score.most))
    marks = [
        tag("line", x1=0, x2="100%", y1=10, y2=10, class_="axis"),
        tag("rect", x=percent_at(least), width=percent_at(max(0.0, most - least)), y=6, height=8, rx=4, class_="range"),
        tag("line", x1=percent_at(median), x2=percent_at(median), y1=3, y2=17, class_="median"),
    ]
    if threshold is not None:
        at = percent_at(scales.share_of(threshold, 0, 1))
        marks.append(tag("line", tip(f"threshold {threshold:.2f}"), x1=at, x2=at, y1=0, y2=20, class_="threshold"))
    for rank, node, value in score.worst:
        at, told = percent_at(scales.share_of(value, 0, 1)), tip(f"rank {rank}", node, f"score {value:.2f}")
        class_ = "slow" if threshold is not None and value < threshold else "worst"
        marks.append(tag("circle", told, cx=at, cy=10, r=4, class_=class_))
    return tag("svg", *marks, class_="inline score", height=20, aria_hidden="true")


def heat_class(ratio: float | None) -> str:
    """Return the class of a cell's colour."""
    if ratio is None or not math.isfinite(ratio):
        return "h-none"
    return f"h{sum(ratio >= step for step in HEAT_STEPS)}"


def heat_legend() -> Sequence[tuple[Markup, str]]:
    """Return the colours of a heat map with what each means."""
    middle = [f"{low:g} to {high:g}" for low, high in pairwise(HEAT_STEPS)]
    words = [f"below {HEAT_STEPS[0]:g}", *middle, f"{HEAT_STEPS[-1]:g} and more"]
    return [*((swatch(f"h{index}"), word) for index, word in enumerate(words)), (swatch("h-none"), "nothing told")]


def heat_map(heat: HeatMap, pins: Sequence[Pin], span: TimeSpan) -> Markup:
    """Return ranks over time: one row can be focused, the script tells its cells."""
    count = max(1, len(heat.rows))
    row_height = max(4.0, min(24.0, _MAP_HEIGHT // count))
    height = row_height * count
    every = max(1, math.ceil(15 / row_height))
    labels = [(row_height * (row + 0.5), _ranks(*heat.rows[row])) for row in range(0, len(heat.rows), every)]
    return framed(
        f"Heat map: {len(heat.rows)} rows of ranks, {max(0, len(heat.times) - 1)} columns of time",
        height,
        span,
        labels,
        _heat_cells(heat.cells, heat.times, span, row_height),
        *(_heat_row(heat, row, span, row_height) for row in range(len(heat.rows))),
        time_axis(span, height, height + 3),
        pin_lines(pins, span, height),
    )


def heat_strip(cells: Sequence[float | None], times: Sequence[float], span: TimeSpan) -> Markup:
    """Return the cells of one rank as one line of a table."""
    return tag("svg", _heat_cells((cells,), times, span, 14.0), class_="inline", height=14, aria_hidden="true")


def _heat_cells(
    cells: Sequence[Sequence[float | None]], times: Sequence[float], span: TimeSpan, row_height: float
) -> Markup:
    """Return one path for each colour: neighbours of one colour are one rectangle of it."""
    found: dict[str, list[str]] = {}
    for row, values in enumerate(cells):
        begin = 0
        columns = min(len(values), max(0, len(times) - 1))
        for column in range(1, columns + 1):
            if column < columns and heat_class(values[column]) == heat_class(values[begin]):
                continue
            left, right = WIDTH * span.share(times[begin]), WIDTH * span.share(times[column])
            cell = f"M{digits(left)} {digits(row * row_height)}H{digits(right)}v{digits(row_height)}H{digits(left)}z"
            found.setdefault(heat_class(values[begin]), []).append(cell)
            begin = column
    paths = [tag("path", d="".join(parts), class_=class_) for class_, parts in sorted(found.items())]
    return stretched(row_height * max(1, len(cells)), *paths, class_="cells")


def _heat_row(heat: HeatMap, row: int, span: TimeSpan, row_height: float) -> Markup:
    first, last = heat.rows[row]
    cells = heat.cells[row] if row < len(heat.cells) else ()
    members = heat.slowest[row] if row < len(heat.slowest) else ()
    node = heat.nodes[row] if row < len(heat.nodes) else None
    told = scales.finite(cells)
    worst = max(range(len(cells)), key=lambda column: cells[column] or 0.0, default=0)
    words = f"{'rank' if first == last else 'ranks'} {_ranks(first, last)}" + (f" on {node}" if node else "")
    if told:
        who = f", by rank {members[worst]}" if first != last and worst < len(members) else ""
        words += (
            f": slowest {max(told):.2f} times the median{who}, at {scales.elapsed(heat.times[worst] - span.began_at)}"
        )
    else:
        words += ": nothing told"
    return tag(
        "rect",
        tag("title", words),
        y=row * row_height,
        width="100%",
        height=row_height,
        class_="heat-row",
        tabindex=0,
        role="img",
        aria_label=words,
        data_name=words.partition(":")[0],
        data_values=" ".join("-" if not scales.finite([value]) else f"{value:.2f}" for value in cells),
        data_ranks=" ".join("-" if rank is None else str(rank) for rank in members) if first != last else None,
        data_edges=" ".join(digits(at - span.began_at) for at in heat.times) if row == 0 else None,
    )


def _ranks(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
