"""All nodes' windows together: verdicts as they fill, and the reports. Pure; one node of a job does this.

The judge is told the time of a pass. What it says is put back into that of a step of the training here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import attrs

from resilience_sdk.straggler.detector import Judge
from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.reports import Medians, Report, ReportMaker
from resilience_sdk.straggler.verdicts import QUIET, Change, SlowVerdict
from resilience_sdk.straggler.window_messages import Assembly, NodePieces, Piece
from resilience_sdk.straggler.windowing import (
    COMPARED,
    WAITING,
    RankPlace,
    Section,
    SectionWindow,
    Window,
    median,
    recorded,
    typical_s,
)

_MOST_MEDIANS = 512
_SAME_RATE = 0.2
_SILENT = 6  # times as many windows as usual came since the last one of a section: it is not passed any more
_AT_ONCE = 16_384  # durations of ranks that are judged in one go: then the monitor looks at its ranks again
_LEAST_STEP_S = 5e-3  # in a loop that is faster, the scheduler of the host makes most of the differences
_SCORED = ("compute", "io")

_Pieces = Mapping[int, Piece]
"""Node -> its part of one window."""


@attrs.define
class _Known:
    """What is known of one section."""

    often: float = 1.0  # how often it is passed in a step
    windows: int = 0  # how many of it came
    last: int = 0  # which of all windows was its last one
    apart: int = 0  # how many came from the one before it to that
    typical_s: float = 0.0
    too_short: int = 0  # its last windows that were not judged
    is_joint: bool = False
    medians: dict[int, list[float]] = attrs.field(factory=dict)  # since the last report, of each rank


class Aggregate:
    """What is known of all ranks of a job in one attempt."""

    def __init__(self, nodes: int) -> None:
        """Wait for the windows of `nodes` nodes."""
        self._judge_of_all = Judge({})
        self._maker = ReportMaker({})
        self._assembly: Assembly[Piece] = Assembly(range(nodes))
        self._known: dict[Section, _Known] = {}
        self._passing: set[Section] = set()
        self._windows = 0
        self._queue: deque[tuple[Section, _Pieces]] = deque()
        self._kernels: dict[int, tuple[KernelTime, ...]] = {}
        self._kernel_windows: dict[int, int] = {}
        self._span: tuple[int, int] | None = None
        self._step_s = 0.0

    def add(self, told: NodePieces) -> None:
        """Take the message of a node; what it repeats is dropped."""
        for rank, role in told.roles.items():
            place = RankPlace(told.name, role)
            self._judge_of_all.place(rank, place)
            self._maker.place(rank, place)
        for piece in told.pieces:
            self._assembly.offer(told.node, piece.section, piece.index, piece)
        for rank, window in told.kernels.items():
            if self._kernel_windows.get(rank) != window.window:
                self._kernel_windows[rank] = window.window
                self._kernels[rank] = window.kernels

    @property
    def verdicts(self) -> tuple[SlowVerdict, ...]:
        """What stands now."""
        return tuple(map(self._in_steps, self._judge_of_all.verdicts))

    def judge(self) -> list[Change]:
        """Judge windows that have become complete, and return what has changed.

        Of very many ranks one section at a time, so that nobody waits for this: the rest follows with the next calls.
        The waits go first, which tell something about the others.
        """
        complete = [(section, pieces) for section, _, pieces in self._assembly.take()]
        self._queue += sorted(complete, key=lambda one: (_steps_of(one[1])[1], one[0][1] not in WAITING))
        changes: list[Change] = []
        room = _AT_ONCE
        while self._queue and room > 0:
            section, pieces = self._queue.popleft()
            room -= sum(len(piece.rows) for piece in pieces.values())
            changes += self._judge(section, pieces)
        if not self._queue:
            changes += self._retire()
        return self._all_in_steps(changes)

    def end(self) -> list[Change]:
        """End all that stands: nobody is compared any more."""
        return self._all_in_steps(self._judge_of_all.forget_all())

    def report(self, relative_threshold: float, individual_threshold: float) -> Report | None:
        """Return the report over what came since the last one; None if nothing did."""
        sections = {_scored_as(*section): known for section, known in self._known.items() if known.medians}
        if not sections and not self._kernels:
            return None
        rules = self._judge_of_all.rules
        medians = Medians(
            {
                name: {rank: median(values) for rank, values in known.medians.items()}
                for name, known in sections.items()
            },
            dict(self._kernels),
            {name: rules.least_excess_of_pass_s(self._step_s, known.often) for name, known in sections.items()},
            {name: known.often for name, known in sections.items()},
        )
        first, last = self._span or (None, None)
        found = self._maker.make(
            medians,
            self.verdicts,
            first_step=first,
            last_step=last,
            relative_threshold=relative_threshold,
            individual_threshold=individual_threshold,
        )
        for known in self._known.values():
            known.medians.clear()
        self._kernels.clear()
        self._span = None
        return found

    def _judge(self, section: Section, pieces: _Pieces) -> list[Change]:
        known = self._note(section, pieces)
        (name, kind), of_nodes = section, pieces.values()
        rows = {rank: row for piece in of_nodes for rank, row in piece.decoded().items()}
        amounts = {rank: row for piece in of_nodes for rank, row in piece.amounts().items()}
        window = SectionWindow(name, kind, rows, amounts, is_joint=known.is_joint)
        known.typical_s = typical_s(window)
        if kind in COMPARED and not known.is_joint:
            _remember(known, rows)
        told_s = [piece.step_s for piece in of_nodes if piece.step_s is not None]
        if told_s:
            self._step_s = median(told_s)
            if self._step_s < _LEAST_STEP_S:
                known.too_short += 1
                return self._judge_of_all.forget(*section) if known.too_short == QUIET else []
        known.too_short = 0
        step_s = self._step_s / known.often if told_s else self._estimated_s()
        first, last = _steps_of(pieces)
        return self._judge_of_all.add(Window(first, (window,), step_s, known.often, last))

    def _note(self, section: Section, pieces: _Pieces) -> _Known:
        """Note that a window of a section has come."""
        self._windows += 1
        self._passing.add(section)
        known = self._known.setdefault(section, _Known())
        known.windows += 1
        known.apart, known.last = self._windows - known.last, self._windows
        told = median([piece.passes_per_step for piece in pieces.values()])
        if not 0.0 < told < math.inf:
            told = 1.0  # no node of ours says that
        if known.windows == 1 or abs(told - known.often) > _SAME_RATE * known.often:
            known.often = told
        if any(piece.is_joint for piece in pieces.values()):
            known.is_joint = True
            known.medians.clear()
        first, last = _steps_of(pieces)
        self._span = (first, last) if self._span is None else (min(first, self._span[0]), max(last, self._span[1]))
        return known

    def _estimated_s(self) -> float:
        """Return how long a step takes, where no heartbeat tells: as long as its sections, of which the one that is
        passed most often is passed once.
        """
        of_all = [known for section, known in self._known.items() if section[1] in COMPARED + WAITING]
        most = max((known.windows for known in of_all), default=1)
        return sum(known.typical_s * known.windows / most for known in of_all)

    def _retire(self) -> list[Change]:
        """End what is said about sections that are not passed any more, while others are."""
        changes: list[Change] = []
        for section in sorted(self._passing):
            known = self._known[section]
            if self._windows - known.last > _SILENT * max(known.apart, len(self._passing)):
                self._passing.discard(section)
                changes += self._judge_of_all.forget(*section)
        return changes

    def _all_in_steps(self, changes: Iterable[Change]) -> list[Change]:
        return [attrs.evolve(change, verdict=self._in_steps(change.verdict)) for change in changes]

    def _in_steps(self, verdict: SlowVerdict) -> SlowVerdict:
        known = self._known.get((verdict.section, verdict.section_kind))
        return attrs.evolve(verdict, excess_s=verdict.excess_s * known.often) if known is not None else verdict


def _remember(known: _Known, rows: Mapping[int, tuple[float, ...]]) -> None:
    """Keep the median of each rank for the report."""
    for rank, row in rows.items():
        if present := recorded(row):
            values = known.medians.setdefault(rank, [])
            values.append(median(present))
            if len(values) > _MOST_MEDIANS:
                del values[::2]


def _steps_of(pieces: _Pieces) -> tuple[int, int]:
    """Return the first and the last step of a window."""
    return min(piece.first_step for piece in pieces.values()), max(piece.last_step for piece in pieces.values())


def _scored_as(name: str, kind: str) -> str:
    """Return the name under which a section stands in reports."""
    return name if kind in _SCORED else f"{name} ({kind})"
