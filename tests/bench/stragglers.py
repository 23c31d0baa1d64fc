"""The CPU time of a report, and of one window of the verdicts, up to 16,384 ranks and ten sections."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from resilience_sdk.monitor.stragglers import READ_AT_ONCE
from resilience_sdk.straggler.detector import Aggregate, Judge
from resilience_sdk.straggler.kernels import KernelTime, KernelWindow
from resilience_sdk.straggler.reports import Medians, ReportMaker
from resilience_sdk.straggler.window_messages import NodePieces, Piece, decode, write_row
from resilience_sdk.straggler.windowing import RankPlace, SectionWindow, Window
from tests.bench.figures import Context, Figure

SECTIONS = 10
TARGETS_MS = {1024: 40.0, 16384: 500.0}


def measure(context: Context) -> list[Figure]:
    """Measure reports of 1,024 to 16,384 ranks, and how the time grows with them."""
    figures = []
    medians = {}
    for ranks in (1024, 4096, 16384):
        figure = _report(ranks, context.repeats(9, 3))
        medians[ranks] = figure.median or math.nan
        figures.append(figure)
    exponent = math.log(medians[16384] / medians[1024]) / math.log(16)
    figures.append(Figure("report, scaling exponent", "ours", "", (exponent,), note="time ~ ranks ** exponent"))
    for ranks in (8, 1024) if context.quick else (8, 1024, 16384):
        figures.append(_window(ranks, context.repeats(9, 3)))
    for ranks in (1024,) if context.quick else (1024, 16384):
        figures.append(_gathering(ranks, context.repeats(4, 2)))
    return figures


def _report(ranks: int, repeats: int) -> Figure:
    source = random.Random(ranks)
    places = {rank: RankPlace(f"node{rank // 8}") for rank in range(ranks)}
    maker = ReportMaker(places)
    samples, printed = [], []
    for _ in range(repeats + 2):  # the first two fill the history
        medians = {
            f"section{n}": {rank: 0.1 * source.lognormvariate(0.0, 0.02) for rank in range(ranks)}
            for n in range(SECTIONS)
        }
        report, seconds = _timed(lambda medians=medians: maker.make(Medians(medians)))
        samples.append(1000 * seconds)
        printed.append(1000 * _timed(report.text)[1])
        samples[-1] += printed[-1]
    return Figure(
        f"report, {ranks} ranks x {SECTIONS} sections",
        "ours",
        "ms",
        tuple(samples[2:]),
        target=TARGETS_MS.get(ranks),
        note=f"of which {min(printed):.0f} ms are for its text",
    )


def _window(ranks: int, repeats: int) -> Figure:
    source = random.Random(ranks)
    judge = Judge({rank: RankPlace(f"node{rank // 8}") for rank in range(ranks)})
    samples = []
    for number in range(8 + repeats):  # the first eight fill the history
        rows = {rank: [0.1 * source.lognormvariate(0.0, 0.03) for _ in range(8)] for rank in range(ranks)}
        window = Window(8 * number, (SectionWindow("fwd", "compute", rows),))
        samples.append(1000 * _timed(lambda window=window: judge.add(window))[1])
    return Figure(f"verdicts, a window of 8 steps, {ranks} ranks", "ours", "ms", tuple(samples[8:]), note="per section")


def _gathering(ranks: int, windows: int) -> Figure:
    """Measure the longest time for which the judging monitor sees nothing else: messages as text, then verdicts."""
    source, nodes = random.Random(ranks), ranks // 8
    aggregate = Aggregate(nodes)
    longest, published = [], []
    for window in range(windows):
        goes = []
        texts = [_message(node, window, source) for node in range(nodes)]
        for first in range(0, nodes, READ_AT_ONCE):
            told, seconds = _timed(lambda texts=texts[first : first + READ_AT_ONCE]: [decode(text) for text in texts])
            goes.append(seconds + _timed(lambda told=told: [aggregate.add(node) for node in told])[1])
        goes += [_timed(aggregate.judge)[1] for _ in range(SECTIONS + 1)]
        longest.append(1000 * max(goes))
        published.append(1000 * _timed(lambda: aggregate.report(0.7, 0.7).to_json())[1])
    return Figure(
        f"gathering, {ranks} ranks x {SECTIONS} sections and kernels: longest go",
        "ours",
        "ms",
        tuple(longest),
        note=f"and {min(published):.0f} ms at the report, with its JSON",
    )


def _message(node: int, window: int, source: random.Random) -> str:
    ranks = range(8 * node, 8 * node + 8)
    pieces = tuple(
        Piece(
            f"section{n}",
            "compute",
            window,
            8 * window,
            8 * window + 7,
            1.0,
            0.1,
            {rank: write_row(tuple(int(1e8 * source.lognormvariate(0.0, 0.03)) for _ in range(8))) for rank in ranks},
        )
        for n in range(SECTIONS)
    )
    kernels = tuple(KernelTime(f"kernel{n}", 10, 1e-3, 1e-2) for n in range(16))
    sampled = {rank: KernelWindow(window + 1, kernels) for rank in ranks}
    return NodePieces(0, node, f"node{node}", window, pieces, dict.fromkeys(ranks, ""), sampled).to_text()


def _timed(work: Callable[[], object]) -> tuple[object, float]:
    """Return a result and the CPU time it took, which is what it costs beside ranks that keep the cores busy."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start
