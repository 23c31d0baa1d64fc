"""The heat map of ranks over time: each one's own time in a step beside that of all others then. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from resilience_sdk.report.digest import ProgressRows
from resilience_sdk.report.facts import HeatMap

MOST_COLUMNS = 120
MOST_ROWS = 128
_MOST_WORST = 20
_LEAST_RANKS = 2


def heat_map(rows: ProgressRows, *, columns: int = MOST_COLUMNS, most_rows: int = MOST_ROWS) -> HeatMap | None:
    """Return the heat map; None for a single rank, which has nobody to be compared with."""
    ranks = sorted(rows.node_of)
    if len(ranks) < _LEAST_RANKS or not len(rows):
        return None
    began = min(at - wall_s for at, wall_s in zip(rows.at, rows.wall_s, strict=True))
    ended = max(rows.at)
    told_most = max(_times_told(rows).values())
    columns = max(1, min(columns, told_most))
    width = (ended - began) / columns
    if not 0 < width < math.inf:
        return None
    has_own = any(own == own for own in rows.own_ms)
    means = _means(rows, ranks, began, width, columns, own=has_own)
    ratios = _ratios(means, len(ranks), columns)
    spans = _rows(ranks, rows.node_of, most_rows)
    cells, slowest = _cells(ratios, spans, ranks, columns)
    return HeatMap(
        times=tuple(began + width * column for column in range(columns + 1)),
        rows=tuple((ranks[first], ranks[last]) for first, last in spans),
        cells=cells,
        slowest=slowest,
        nodes=tuple(_one_node([rows.node_of[rank] for rank in ranks[first : last + 1]]) for first, last in spans),
        worst=_worst(ratios, ranks, rows.node_of, columns),
        measure="own" if has_own else "step",
    )


def _times_told(rows: ProgressRows) -> dict[int, int]:
    count: dict[int, int] = {}
    for group in rows.groups:
        count[group] = count.get(group, 0) + 1
    return count


def _means(
    rows: ProgressRows, ranks: Sequence[int], began: float, width: float, columns: int, *, own: bool
) -> array[float]:
    """Return by rank and column the mean time of a rank in it, NaN where it told none.

    A row counts in all columns that its time touches, with the part of it that lies there.
    """
    place_of = {rank: place for place, rank in enumerate(ranks)}
    bases_of = [[place_of[rank] * columns for rank in group] for group in rows.ranks_of]
    sums, weights = array("d", bytes(8 * len(ranks) * columns)), array("d", bytes(8 * len(ranks) * columns))

    def add(group: int, column: int, weight: float, values: Sequence[float]) -> None:
        for base, value in zip(bases_of[group], values, strict=True):
            if value == value:
                sums[base + column] += value
                weights[base + column] += weight

    # What all ranks of a node tell is added up as one, which is most of it.
    whole: dict[tuple[int, int], tuple[float, list[float]]] = {}
    told, means = rows.own_ms, rows.mean_s
    for at, wall_s, group, offset, mean_s in zip(rows.at, rows.wall_s, rows.groups, rows.offsets, means, strict=True):
        count = len(bases_of[group])
        values = told[offset : offset + count] if own else [mean_s] * count
        is_whole = sum(values) == sum(values)
        begin, end = (at - wall_s - began) / width, (at - began) / width
        for column in range(max(0, int(begin)), min(columns - 1, int(end)) + 1):
            weight = min(end, column + 1) - max(begin, column)
            if weight <= 0:
                continue
            if not is_whole:
                add(group, column, weight, [value * weight for value in values])
            elif (known := whole.get((group, column))) is None:
                whole[group, column] = weight, [value * weight for value in values]
            else:
                sofar = [a + value * weight for a, value in zip(known[1], values, strict=True)]
                whole[group, column] = known[0] + weight, sofar
    for (group, column), (weight, values) in whole.items():
        add(group, column, weight, values)
    for place, weight in enumerate(weights):
        sums[place] = sums[place] / weight if weight else math.nan
    return sums


def _ratios(means: array[float], ranks: int, columns: int) -> array[float]:
    """Return each mean over the median of all ranks in its column; NaN where there is nobody else."""
    for column in range(columns):
        told = sorted(value for value in means[column::columns] if value == value)
        middle = 0.0
        if len(told) >= _LEAST_RANKS:
            half = len(told) // 2
            middle = told[half] if len(told) % 2 else (told[half - 1] + told[half]) / 2
        for place in range(column, ranks * columns, columns):
            means[place] = means[place] / middle if middle > 0 else math.nan
    return means


def _rows(ranks: Sequence[int], node_of: Mapping[int, str], most: int) -> list[tuple[int, int]]:
    """Return the first and last place of each row, so many at most; a node begins a row, where all nodes are alike."""
    count = len(ranks)
    if count <= most:
        return [(place, place) for place in range(count)]
    size = math.ceil(count / most)
    if (of_node := _ranks_per_node(ranks, node_of)) is not None:
        while of_node % size and size % of_node:
            size += 1
    return [(first, min(count, first + size) - 1) for first in range(0, count, size)]


def _ranks_per_node(ranks: Sequence[int], node_of: Mapping[int, str]) -> int | None:
    """Return how many ranks each node has, None where that differs or a node's ranks do not follow one another."""
    runs: list[list[object]] = []
    for rank in ranks:
        if runs and runs[-1][0] == node_of[rank]:
            runs[-1].append(rank)
        else:
            runs.append([node_of[rank], rank])
    sizes = {len(run) - 1 for run in runs}
    return sizes.pop() if len(sizes) == 1 else None


def _cells(
    ratios: array[float], spans: Sequence[tuple[int, int]], ranks: Sequence[int], columns: int
) -> tuple[tuple[tuple[float | None, ...], ...], tuple[tuple[int | None, ...], ...]]:
    cells: list[tuple[float | None, ...]] = []
    slowest: list[tuple[int | None, ...]] = []
    for first, last in spans:
        values: list[float | None] = []
        who: list[int | None] = []
        for column in range(columns):
            of_row = ratios[first * columns + column : last * columns + column + 1 : columns]
            told = [(ratio, place) for place, ratio in enumerate(of_row) if ratio == ratio]
            most = max(told, default=None)
            values.append(None if most is None else round(most[0], 4))
            who.append(None if most is None else ranks[first + most[1]])
        cells.append(tuple(values))
        slowest.append(tuple(who))
    return tuple(cells), tuple(slowest)


def _one_node(nodes: Sequence[str]) -> str | None:
    return nodes[0] or None if len(set(nodes)) == 1 else None


def _worst(
    ratios: array[float], ranks: Sequence[int], node_of: Mapping[int, str], columns: int
) -> tuple[tuple[int, str | None, float, tuple[float | None, ...]], ...]:
    """Return the ranks whose mean ratio is the largest, the slowest first."""
    means = []
    for place, rank in enumerate(ranks):
        told = [ratio for ratio in ratios[place * columns : (place + 1) * columns] if ratio == ratio]
        if told:
            means.append((sum(told) / len(told), -rank, place))
    found = []
    for mean, rank, place in sorted(means, reverse=True)[:_MOST_WORST]:
        cells = ratios[place * columns : (place + 1) * columns]
        shown = tuple(None if ratio != ratio else round(ratio, 4) for ratio in cells)
        found.append((-rank, node_of[-rank] or None, round(mean, 4), shown))
    return tuple(found)
