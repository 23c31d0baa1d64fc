"""All nodes' windows together: verdicts as they fill, and the reports. Pure; one node of a job does this.

The judge counts windows, not steps: its step 8n is the n-th window of sections that are passed equally often. What it
says is put back into steps of the training here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.straggler.assembly import Assembly
from resilience_sdk.straggler.cutting import Section
from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.pieces import NodePieces, Piece, median_of
from resilience_sdk.straggler.reports import Report, ReportMaker
from resilience_sdk.straggler.robust import Judge
from resilience_sdk.straggler.scores import Medians
from resilience_sdk.straggler.verdicts import Change, Verdict
from resilience_sdk.straggler.window import (
    COMPARED,
    WHOLE_STEP,
    WINDOW_STEPS,
    Place,
    SectionWindow,
    Window,
    median,
    recorded,
)

_TOGETHER_S = 1.0  # how long windows of the same passes wait for one another
_REMEMBERED = 4096
_MOST_MEDIANS = 512
_SAME_RATE = 0.2
_LEAST_STEP_S = 5e-3  # in a loop that is faster, the scheduler of the host makes most of the differences
_SCORED = ("compute", "io")


@attrs.define
class _Bundle:
    since_s: float
    sections: dict[Section, dict[int, Piece]] = attrs.field(factory=dict)


@attrs.define
class _Group:
    """Sections that are passed equally often."""

    newest: dict[Section, int] = attrs.field(factory=dict)
    waiting: dict[int, _Bundle] = attrs.field(factory=dict)
    count: int = 0
    steps: deque[tuple[int, int]] = attrs.field(factory=lambda: deque(maxlen=_REMEMBERED))
    """First and last step of the last windows."""

    def step_at(self, window: int, end: int) -> int:
        """Return the first (`end` 0) or last (1) step of a window; of those forgotten, of the oldest known."""
        known = window - (self.count - len(self.steps))
        return self.steps[min(max(0, known), len(self.steps) - 1)][end]


class Aggregate:
    """What is known of all ranks of a job in one attempt."""

    def __init__(self, nodes: int, *, relative_threshold: float, individual_threshold: float) -> None:
        """Wait for the windows of `nodes` nodes."""
        self._judge = Judge({})
        self._maker = ReportMaker({}, relative_threshold=relative_threshold, individual_threshold=individual_threshold)
        self._assembly: Assembly[Piece] = Assembly(range(nodes))
        self._groups: dict[float, _Group] = {}
        self._group_of: dict[Section, float] = {}
        self._medians: dict[str, dict[int, list[float]]] = {}
        self._kernels: dict[int, tuple[KernelTime, ...]] = {}
        self._span: tuple[int, int] | None = None

    def set_thresholds(self, *, relative: float, individual: float) -> None:
        """Change what is below a threshold, from the next report on."""
        self._maker.relative_threshold, self._maker.individual_threshold = relative, individual

    def add(self, told: NodePieces) -> None:
        """Take the message of a node; what it repeats is dropped."""
        for rank, role in told.roles.items():
            place = Place(told.name, role)
            self._judge.place(rank, place)
            self._maker.place(rank, place)
        for piece in told.pieces:
            self._assembly.offer(told.node, piece.section, piece.index, piece)
        self._kernels.update(told.kernels)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What stands now."""
        return tuple(map(self._in_steps, self._judge.verdicts))

    def judge(self, now_s: float) -> list[Change]:
        """Judge the windows that have become complete, and return what has changed; `now_s` is a steady clock."""
        for section, index, pieces in self._assembly.take():
            often = self._often(section, median([piece.passes_per_step for piece in pieces.values()]))
            group = self._groups.setdefault(often, _Group())
            group.newest[section] = index
            group.waiting.setdefault(index, _Bundle(now_s)).sections[section] = pieces
        changes: list[Change] = []
        for often, group in self._groups.items():
            for index in sorted(group.waiting):
                bundle = group.waiting[index]
                missing = [s for s, newest in group.newest.items() if newest < index]
                if missing and now_s - bundle.since_s < _TOGETHER_S:
                    break
                changes += self._judge_bundle(group, often, group.waiting.pop(index))
        return [attrs.evolve(change, verdict=self._in_steps(change.verdict)) for change in changes]

    def report(self) -> Report | None:
        """Return the report over what came since the last one; None if nothing did."""
        if not self._medians and not self._kernels:
            return None
        sections = {
            name: {rank: median(values) for rank, values in of_ranks.items()}
            for name, of_ranks in self._medians.items()
        }
        first, last = self._span or (None, None)
        found = self._maker.make(Medians(sections, dict(self._kernels)), self.verdicts, first, last)
        self._medians.clear()
        self._kernels.clear()
        self._span = None
        return found

    def _often(self, section: Section, told: float) -> float:
        """Return how often a section is passed per step: what was known, unless that has really changed."""
        known = self._group_of.get(section)
        return known if known is not None and abs(told - known) <= _SAME_RATE * known else told

    def _judge_bundle(self, group: _Group, often: float, bundle: _Bundle) -> tuple[Change, ...]:
        self._group_of.update(dict.fromkeys(bundle.sections, often))
        pieces = [piece for of_nodes in bundle.sections.values() for piece in of_nodes.values()]
        first, last = min(p.first_step for p in pieces), max(p.last_step for p in pieces)
        group.steps.append((first, last))
        group.count += 1
        self._span = (first if self._span is None else min(first, self._span[0]), last)
        sections = []
        for (name, kind), of_nodes in bundle.sections.items():
            rows = {rank: row for piece in of_nodes.values() for rank, row in piece.decoded().items()}
            self._remember(name, kind, rows)
            sections.append(SectionWindow(name, kind, rows))
        if any(kind in COMPARED for _, kind in self._group_of):
            sections = [section for section in sections if section.kind not in WHOLE_STEP]
        steps_s = median_of([piece.step_s for piece in pieces if piece.step_s is not None])
        if steps_s is not None and steps_s < _LEAST_STEP_S:
            return ()
        window = Window(
            first_step=(group.count - 1) * WINDOW_STEPS,
            sections=tuple(sections),
            step_time_s=None if steps_s is None else steps_s / often,
        )
        return self._judge.add(window) if sections else ()

    def _remember(self, name: str, kind: str, rows: Mapping[int, Sequence[float | None]]) -> None:
        if kind not in COMPARED:
            return
        of_ranks = self._medians.setdefault(name if kind in _SCORED else f"{name} ({kind})", {})
        for rank, row in rows.items():
            if present := recorded(row):
                values = of_ranks.setdefault(rank, [])
                values.append(median(present))
                if len(values) > _MOST_MEDIANS:
                    del values[::2]

    def _in_steps(self, verdict: Verdict) -> Verdict:
        often = self._group_of.get((verdict.section, verdict.section_kind), 1.0)
        group = self._groups[often]
        until = verdict.until_step
        return attrs.evolve(
            verdict,
            since_step=group.step_at(verdict.since_step // WINDOW_STEPS, 0),
            last_step=group.step_at(verdict.last_step // WINDOW_STEPS, 1),
            until_step=None if until is None else group.step_at(until // WINDOW_STEPS, 1),
            excess_s=verdict.excess_s * often,
        )
