"""One node's windows: the durations of its ranks, cut, aligned and thinned. Pure; the monitor reads the pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence

import attrs

from resilience_sdk.straggler.assembly import Assembly
from resilience_sdk.straggler.cutting import RankCutter, Row, Section, first_pass
from resilience_sdk.straggler.pieces import Piece, Thinning, write_amounts, write_row
from resilience_sdk.straggler.rates import Rate
from resilience_sdk.straggler.told import WORK, Amounts, Told
from resilience_sdk.straggler.window import COMPARED, WHOLE_STEP, WINDOW_STEPS, median

_IGNORED = ("idle",)
_USUAL = "step"  # the name of a heartbeat that was given none
_NANO = 1e9


def _tells_steps(beat: Section) -> tuple[bool, bool]:
    """Return what is greater for the heartbeat that tells the steps of a rank.

    Pulses of an optimizer end where a script beats by itself, and there may have been some: to load its state, an
    optimizer may be made to take a step.
    """
    name, kind = beat
    return name == _USUAL, kind == "heartbeat"


@attrs.define
class _Rank:
    process: Hashable
    is_late: bool
    """Whether it began when others had come far, so that its windows are counted anew (`Assembly`)."""
    cutter: RankCutter = attrs.field(factory=RankCutter)
    steps: int = 0
    """Heartbeats that it has completed; 0 where nothing tells."""
    steps_ns: deque[int] = attrs.field(factory=lambda: deque(maxlen=WINDOW_STEPS))
    rates: dict[Section, Rate] = attrs.field(factory=dict)
    told: Told = attrs.field(factory=Told)
    beat: Section | None = None
    """The heartbeat that tells its steps."""
    _began: dict[Section, int] = attrs.field(factory=dict)
    _steps_before: int = 0

    def beats(self, section: Section, start: int, durations_ns: Sequence[int]) -> None:
        """Take completed heartbeats. Of several, such as one of an evaluation, one tells: the usual, or the first."""
        if self.beat is None or _tells_steps(section) > _tells_steps(self.beat):
            self.beat = section
            self.steps = self._steps_before = start
            self.steps_ns.clear()
        if section == self.beat:
            self.steps = start + len(durations_ns)
            self.steps_ns.extend(durations_ns[1 if start == 0 else -WINDOW_STEPS :])

    def passes(self, section: Section, start: int) -> None:
        """Note that passes from number `start` on have come."""
        self._began.setdefault(section, start)

    def count(self) -> None:
        """Take the counts of this moment, when all that was completed has been added."""
        for section, start in self._began.items():
            rate = self.rates.setdefault(section, Rate((start, self._steps_before)))
            passes = self.cutter.passes[section]
            if passes != rate.now[0]:
                rate.note(passes, self.steps)
        self._steps_before = self.steps


@attrs.frozen
class _Passed:
    """A window of one rank."""

    row: Row
    amounts: Amounts | None


class Collector:
    """The ranks of one node in one attempt."""

    def __init__(self, nodes: int) -> None:
        """Collect as one of `nodes` nodes."""
        self._ranks: dict[int, _Rank] = {}
        self._assembly: Assembly[_Passed] = Assembly((), realign=True)
        self._thinning = Thinning(nodes)
        self._has_taken = False

    def present(self, processes: Mapping[int, Hashable]) -> None:
        """Note the living ranks and what tells their processes apart: another process begins anew."""
        for rank in [rank for rank, known in self._ranks.items() if processes.get(rank) != known.process]:
            del self._ranks[rank]
            self._assembly.forget(rank)
        for rank, process in processes.items():
            if rank not in self._ranks:
                self._ranks[rank] = _Rank(process, self._has_taken)
                self._assembly.expect(rank)

    def add(self, rank: int, name: str, kind: str, lane: int, start: int, durations_ns: Sequence[int]) -> None:
        """Take completed passes of a rank that is present; `start` is the number of the first since it began.

        The amounts of work that it has told come first, and are the words of the page.
        """
        known = self._ranks.get(rank)
        if known is None or kind in _IGNORED:
            return
        if kind == WORK:
            known.told.add(name, start, durations_ns)
            return
        section = (name, kind)
        if kind in WHOLE_STEP:
            known.beats(section, start, durations_ns)
        known.passes(section, start)
        every = 1 if known.is_late else self._thinning.stride(section)
        for index, row in known.cutter.add(section, lane, start, durations_ns, every):
            amounts = known.told.of(index, known.cutter.passes[section]) if kind in COMPARED else None
            self._assembly.offer(rank, section, index, _Passed(row, amounts))

    def take(self, first_step: int, now_s: float) -> list[Piece]:
        """Return the windows that are complete on this node; `first_step` is the step that began the attempt."""
        for known in self._ranks.values():
            known.count()
        complete = self._assembly.take()
        self._has_taken = self._has_taken or bool(complete)
        sections = {section for known in self._ranks.values() for section in known.rates}
        named = any(kind in COMPARED for _, kind in sections)
        if named:
            sections = {section for section in sections if section[1] not in WHOLE_STEP}
        self._thinning.share(sections, WINDOW_STEPS * len(self._ranks))
        return [
            self._piece(section, index, passed, first_step)
            for section, index, passed in complete
            if section in sections and self._thinning.lets_through(section, index, now_s)
        ]

    def _piece(self, section: Section, index: int, passed: Mapping[int, _Passed], first_step: int) -> Piece:
        first = first_pass(index)
        rates = [rate for known in self._ranks.values() if (rate := known.rates.get(section)) and known.steps]
        steps = sorted((rate.step_of(first), rate.step_of(first + WINDOW_STEPS - 1)) for rate in rates)
        first_of, last_of = steps[len(steps) // 2] if steps else (first, first + WINDOW_STEPS - 1)
        steps_ns = [median(known.steps_ns) for known in self._ranks.values() if known.steps_ns]
        return Piece(
            name=section[0],
            kind=section[1],
            index=index,
            first_step=first_step + first_of,
            last_step=first_step + last_of,
            passes_per_step=sorted(rate.often for rate in rates)[len(rates) // 2] if rates else 1.0,
            step_s=median(steps_ns) / _NANO if steps_ns else None,
            rows={rank: write_row(of_rank.row) for rank, of_rank in passed.items()},
            work=write_amounts({rank: of_rank.amounts for rank, of_rank in passed.items()}),
        )
