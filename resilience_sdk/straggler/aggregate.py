"""All nodes' windows together: verdicts as they fill, and the reports. Pure; one node of a job does this.

The judge counts windows, not steps: its step 8n is the n-th window of sections that are passed equally often. What it
says is put back into steps of the training here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import attrs

from resilience_sdk.straggler.assembly import Assembly
from resilience_sdk.straggler.cutting import Section
from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.pieces import NodePieces, Piece, read_row
from resilience_sdk.straggler.reports import Report, ReportMaker
from resilience_sdk.straggler.robust import Judge
from resilience_sdk.straggler.scores import Medians
from resilience_sdk.straggler.verdicts import Change, Verdict
from resilience_sdk.straggler.window import (
    COMPARED,
    WAITING,
    WHOLE_STEP,
    WINDOW_STEPS,
    Place,
    SectionWindow,
    Window,
    median,
    recorded,
    step_time,
)

_TOGETHER_S = 1.0  # how long windows of the same passes wait for one another
_REMEMBERED = 4096
_MOST_MEDIANS = 512
_SAME_RATE = 0.2
_SILENT = 8  # windows of a section, or of the usual distance between those told, after which it is not passed any more
_AT_ONCE = 16_384  # durations of ranks that are judged in one go: then the monitor looks at its ranks again
_SAMPLED = 128
_LEAST_STEP_S = 5e-3  # in a loop that is faster, the scheduler of the host makes most of the differences
_SCORED = ("compute", "io")


@attrs.define
class _Bundle:
    since_s: float
    sections: dict[Section, dict[int, Piece]] = attrs.field(factory=dict)


@attrs.frozen
class _Task:
    """Windows that are to be judged."""

    sections: Mapping[Section, Mapping[int, Piece]]
    first_step: int
    """As the judge counts."""
    step_s: float | None
    """Time of a step, per pass; None: too short to be judged."""
    often: float

    @property
    def rows(self) -> int:
        """How many ranks' durations it holds."""
        return sum(len(piece.rows) for of_nodes in self.sections.values() for piece in of_nodes.values())


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
        self._judge_of_all = Judge({})
        self._maker = ReportMaker({}, relative_threshold=relative_threshold, individual_threshold=individual_threshold)
        self._assembly: Assembly[Piece] = Assembly(range(nodes))
        self._groups: dict[float, _Group] = {}
        self._group_of: dict[Section, float] = {}
        self._ends: dict[Section, deque[int]] = {}
        self._queue: deque[_Task] = deque()
        self._medians: dict[str, dict[int, list[float]]] = {}
        self._kernels: dict[int, tuple[KernelTime, ...]] = {}
        self._kernel_windows: dict[int, int] = {}
        self._span: tuple[int, int] | None = None
        self._step_s = 0.0

    def set_thresholds(self, *, relative: float, individual: float) -> None:
        """Change what is below a threshold, from the next report on."""
        self._maker.relative_threshold, self._maker.individual_threshold = relative, individual

    def add(self, told: NodePieces) -> None:
        """Take the message of a node; what it repeats is dropped."""
        for rank, role in told.roles.items():
            place = Place(told.name, role)
            self._judge_of_all.place(rank, place)
            self._maker.place(rank, place)
        for piece in told.pieces:
            self._assembly.offer(told.node, piece.section, piece.index, piece)
        for rank, window in told.kernels.items():
            if self._kernel_windows.get(rank) != window.window:
                self._kernel_windows[rank] = window.window
                self._kernels[rank] = window.kernels

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What stands now."""
        return tuple(map(self._in_steps, self._judge_of_all.verdicts))

    def judge(self, now_s: float) -> list[Change]:
        """Judge windows that have become complete, and return what has changed; `now_s` is a steady clock.

        Of very many ranks one section at a time, so that nobody waits for this: the rest follows with the next calls.
        """
        for section, index, pieces in self._assembly.take():
            often = self._often(section, median([piece.passes_per_step for piece in pieces.values()]))
            group = self._groups.setdefault(often, _Group())
            group.newest[section] = index
            group.waiting.setdefault(index, _Bundle(now_s)).sections[section] = pieces
        for often, group in self._groups.items():
            for index in sorted(group.waiting):
                bundle = group.waiting[index]
                missing = [s for s, newest in group.newest.items() if newest < index]
                if missing and now_s - bundle.since_s < _TOGETHER_S:
                    break
                self._open(group, often, group.waiting.pop(index))
        changes: list[Change] = []
        room = _AT_ONCE
        while self._queue and room > 0:
            room -= self._queue[0].rows
            changes += self._in_steps_of_all(self._judge(self._queue.popleft()))
        return changes if self._queue else changes + self._retire()

    def end(self) -> list[Change]:
        """End all that stands: nobody is compared any more."""
        return self._in_steps_of_all(self._judge_of_all.forget_all())

    def report(self) -> Report | None:
        """Return the report over what came since the last one; None if nothing did."""
        if not self._medians and not self._kernels:
            return None
        sections = {
            name: {rank: median(values) for rank, values in of_ranks.items()}
            for name, of_ranks in self._medians.items()
        }
        rules = self._judge_of_all.rules
        least = {
            _scored_as(name, kind): rules.least_excess_of_pass_s(self._step_s, often)
            for (name, kind), often in self._group_of.items()
        }
        first, last = self._span or (None, None)
        found = self._maker.make(Medians(sections, dict(self._kernels), least), self.verdicts, first, last)
        self._medians.clear()
        self._kernels.clear()
        self._span = None
        return found

    def _often(self, section: Section, told: float) -> float:
        """Return how often a section is passed per step: what was known, unless that has really changed."""
        if not 0.0 < told < math.inf:
            return 1.0  # no node of ours says that
        known = self._group_of.get(section)
        return known if known is not None and abs(told - known) <= _SAME_RATE * known else told

    def _open(self, group: _Group, often: float, bundle: _Bundle) -> None:
        """Put the windows of a bundle into the queue of those that are to be judged: first the waits, which tell
        something about the others.
        """
        self._group_of.update(dict.fromkeys(bundle.sections, often))
        pieces = [piece for of_nodes in bundle.sections.values() for piece in of_nodes.values()]
        first, last = min(p.first_step for p in pieces), max(p.last_step for p in pieces)
        group.steps.append((first, last))
        group.count += 1
        self._span = (first if self._span is None else min(first, self._span[0]), last)
        for section, of_nodes in bundle.sections.items():
            end = max(piece.last_step for piece in of_nodes.values())
            self._ends.setdefault(section, deque(maxlen=2)).append(end)
        told_s = [piece.step_s for piece in pieces if piece.step_s is not None]
        if told_s:
            self._step_s = median(told_s)
        if told_s and median(told_s) < _LEAST_STEP_S:
            step_s = None
        else:
            step_s = median(told_s) / often if told_s else _estimated_s(bundle)
        named = any(kind in COMPARED for _, kind in self._group_of)
        waits = {section: of for section, of in bundle.sections.items() if section[1] in WAITING}
        alone = [{section: of} for section, of in bundle.sections.items() if section not in waits]
        for sections in [waits, *alone]:
            if sections and not (named and all(kind in WHOLE_STEP for _, kind in sections)):
                self._queue.append(_Task(sections, (group.count - 1) * WINDOW_STEPS, step_s, often))

    def _judge(self, task: _Task) -> tuple[Change, ...]:
        sections = []
        for (name, kind), of_nodes in task.sections.items():
            rows = {rank: row for piece in of_nodes.values() for rank, row in piece.decoded().items()}
            amounts = {rank: row for piece in of_nodes.values() for rank, row in piece.amounts().items()}
            self._remember(name, kind, rows)
            sections.append(SectionWindow(name, kind, rows, amounts))
        if task.step_s is None:
            return ()
        return self._judge_of_all.add(
            Window(task.first_step, tuple(sections), step_time_s=task.step_s, passes_per_step=task.often)
        )

    def _retire(self) -> list[Change]:
        """End what is said about sections that are not passed any more, while others are."""
        newest = max((ends[-1] for ends in self._ends.values()), default=0)
        silent = [
            section
            for section, ends in self._ends.items()
            if newest - ends[-1] > _SILENT * max(WINDOW_STEPS / self._group_of[section], ends[-1] - ends[0])
        ]
        changes: list[Change] = []
        for section in silent:
            changes += self._in_steps_of_all(self._judge_of_all.forget(*section))
            del self._ends[section]
            for group in self._groups.values():
                group.newest.pop(section, None)
        return changes

    def _remember(self, name: str, kind: str, rows: Mapping[int, Sequence[float | None]]) -> None:
        if kind not in COMPARED:
            return
        of_ranks = self._medians.setdefault(_scored_as(name, kind), {})
        for rank, row in rows.items():
            if present := recorded(row):
                values = of_ranks.setdefault(rank, [])
                values.append(median(present))
                if len(values) > _MOST_MEDIANS:
                    del values[::2]

    def _in_steps_of_all(self, changes: Iterable[Change]) -> list[Change]:
        return [attrs.evolve(change, verdict=self._in_steps(change.verdict)) for change in changes]

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


def _scored_as(name: str, kind: str) -> str:
    """Return the name under which a section stands in reports."""
    return name if kind in _SCORED else f"{name} ({kind})"


def _estimated_s(bundle: _Bundle) -> float:
    """Return how long a step takes, where no heartbeat tells: as long as its sections, on some of the ranks."""
    sections = []
    for (name, kind), of_nodes in bundle.sections.items():
        texts = ((rank, text) for piece in of_nodes.values() for rank, text in piece.rows.items())
        rows = {rank: row for rank, text in islice(texts, _SAMPLED) if (row := read_row(text)) is not None}
        sections.append(SectionWindow(name, kind, rows))
    return step_time(Window(0, tuple(sections)))
