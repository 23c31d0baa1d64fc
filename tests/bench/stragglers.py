"""The CPU time of a report, and of one window of the verdicts, up to 16,384 ranks and ten sections."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from resilience_sdk.straggler.reports import ReportMaker
from resilience_sdk.straggler.robust import Judge
from resilience_sdk.straggler.scores import Medians
from resilience_sdk.straggler.window import Place, SectionWindow, Window
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
    return figures


def _report(ranks: int, repeats: int) -> Figure:
    source = random.Random(ranks)
    places = {rank: Place(f"node{rank // 8}") for rank in range(ranks)}
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
    judge = Judge({rank: Place(f"node{rank // 8}") for rank in range(ranks)})
    samples = []
    for number in range(8 + repeats):  # the first eight fill the history
        rows = {rank: [0.1 * source.lognormvariate(0.0, 0.03) for _ in range(8)] for rank in range(ranks)}
        window = Window(8 * number, (SectionWindow("fwd", "compute", rows),))
        samples.append(1000 * _timed(lambda window=window: judge.add(window))[1])
    return Figure(f"verdicts, a window of 8 steps, {ranks} ranks", "ours", "ms", tuple(samples[8:]), note="per section")


def _timed(work: Callable[[], object]) -> tuple[object, float]:
    """Return a result and the CPU time it took, which is what it costs beside ranks that keep the cores busy."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start
