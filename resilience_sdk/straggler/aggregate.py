"""All nodes' windows together: verdicts as they fill, and the reports. Pure; one node of a job does this.

The judge is told the time of a pass. What it says is put back into that of a step of the training here.
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
from resilience_sdk.straggler.standing import QUIET
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
    last_step: int
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
        self._opened = 0  # windows in place of steps, as long as no heartbeat tells these
        self._are_steps_told = False
        self._unjudged: dict[Section, int] = {}
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
                self._open(often, group.waiting.pop(index))
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

    def _open(self, often: float, bundle: _Bundle) -> None:
        """Put the windows of a bundle into the queue of those that are to be judged: first the waits, which tell
        something about the others.
        """
        self._group_of.update(dict.fromkeys(bundle.sections, often))
        pieces = [piece for of_nodes in bundle.sections.values() for piece in of_nodes.values()]
        first, last = _steps_of(pieces)
        self._span = (first, last) if self._span is None else (min(first, self._span[0]), max(last, self._span[1]))
        told_s = [piece.step_s for piece in pieces if piece.step_s is not None]
        self._note_ends(bundle, are_steps_told=bool(told_s))
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
                steps = _steps_of(piece for of_nodes in sections.values() for piece in of_nodes.values())
                self._queue.append(_Task(sections, *steps, step_s, often))

    def _note_ends(self, bundle: _Bundle, *, are_steps_told: bool) -> None:
        """Note how far each section has come: in steps. Where nothing tells these, each section counts its own passes,
        which say nothing about another's; then it is noted how many windows have come altogether.
        """
        self._opened += 1
        if are_steps_told and not self._are_steps_told:
            self._are_steps_told = True
            end = max(piece.last_step for of_nodes in bundle.sections.values() for piece in of_nodes.values())
            self._ends = {section: deque([end], maxlen=2) for section in self._ends}
        for section, of_nodes in bundle.sections.items():
            if self._are_steps_told:
                end = max(piece.last_step for piece in of_nodes.values())
                self._ends.setdefault(section, deque(maxlen=2)).append(end)
            else:
                self._ends.setdefault(section, deque([0], maxlen=2)).append(self._opened)

    def _judge(self, task: _Task) -> tuple[Change, ...]:
        sections = []
        for (name, kind), of_nodes in task.sections.items():
            rows = {rank: row for piece in of_nodes.values() for rank, row in piece.decoded().items()}
            amounts = {rank: row for piece in of_nodes.values() for rank, row in piece.amounts().items()}
            self._remember(name, kind, rows)
            sections.append(SectionWindow(name, kind, rows, amounts))
        if task.step_s is None:
            return self._leave_out(task.sections)
        for section in task.sections:
            self._unjudged.pop(section, None)
        return self._judge_of_all.add(
            Window(
                task.first_step,
                tuple(sections),
                step_time_s=task.step_s,
                passes_per_step=task.often,
                last_step=task.last_step,
            )
        )

    def _leave_out(self, sections: Iterable[Section]) -> tuple[Change, ...]:
        """End what is said about sections whose last windows were all too short to be judged."""
        changes: tuple[Change, ...] = ()
        for section in sections:
            self._unjudged[section] = self._unjudged.get(section, 0) + 1
            if self._unjudged[section] == QUIET:
                changes += self._judge_of_all.forget(*section)
        return changes

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
        return attrs.evolve(verdict, excess_s=verdict.excess_s * often)


def _steps_of(pieces: Iterable[Piece]) -> tuple[int, int]:
    """Return the first and the last step of some windows."""
    of_each = [(piece.first_step, piece.last_step) for piece in pieces]
    return min(first for first, _ in of_each), max(last for _, last in of_each)


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
