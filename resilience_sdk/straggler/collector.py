"""One node's windows: the durations of its ranks, cut, aligned and thinned. Pure; the monitor reads the pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence

import attrs

from resilience_sdk.straggler.assembly import Assembly
from resilience_sdk.straggler.cutting import RankCutter, Row, Section, first_pass, passes_per_step
from resilience_sdk.straggler.pieces import Piece, Thinning, median_of, write_row
from resilience_sdk.straggler.window import WHOLE_STEP, WINDOW_STEPS

_IGNORED = ("idle",)
_NANO = 1e9


@attrs.define
class _Rank:
    process: Hashable
    is_late: bool
    """Whether it began when others had come far, so that its windows are counted anew (`Assembly`)."""
    cutter: RankCutter = attrs.field(factory=RankCutter)
    steps_ns: deque[int] = attrs.field(factory=lambda: deque(maxlen=WINDOW_STEPS))

    @property
    def steps(self) -> int:
        """Steps that it has completed; 0 where nothing tells."""
        return max((n for (_, kind), n in self.cutter.passes.items() if kind in WHOLE_STEP), default=0)


class Collector:
    """The ranks of one node in one attempt."""

    def __init__(self, nodes: int) -> None:
        """Collect as one of `nodes` nodes."""
        self._ranks: dict[int, _Rank] = {}
        self._assembly: Assembly[Row] = Assembly((), realign=True)
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
        """Take completed passes of a rank that is present; `start` is the number of the first since it began."""
        known = self._ranks.get(rank)
        if known is None or kind in _IGNORED:
            return
        section = (name, kind)
        if kind in WHOLE_STEP:
            known.steps_ns.extend(durations_ns[1 if start == 0 else -WINDOW_STEPS :])
        every = 1 if known.is_late else self._thinning.stride(section)
        for index, row in known.cutter.add(section, lane, start, durations_ns, every):
            self._assembly.offer(rank, section, index, row)

    def take(self, first_step: int, now_s: float) -> list[Piece]:
        """Return the windows that are complete on this node; `first_step` is the step that began the attempt."""
        complete = self._assembly.take()
        self._has_taken = self._has_taken or bool(complete)
        return [
            self._piece(section, index, rows, first_step)
            for section, index, rows in complete
            if self._thinning.lets_through(section, index, now_s)
        ]

    def _piece(self, section: Section, index: int, rows: Mapping[int, Row], first_step: int) -> Piece:
        often = self._often(section)
        first = first_pass(index)
        steps_ns = [ns for known in self._ranks.values() if (ns := median_of(known.steps_ns)) is not None]
        return Piece(
            name=section[0],
            kind=section[1],
            index=index,
            first_step=first_step + int(first / often),
            last_step=first_step + int((first + WINDOW_STEPS - 1) / often),
            passes_per_step=often,
            step_s=None if not steps_ns else sorted(steps_ns)[len(steps_ns) // 2] / _NANO,
            rows={rank: write_row(row) for rank, row in rows.items()},
        )

    def _often(self, section: Section) -> float:
        """Return how often the section is passed per step, as most ranks have it."""
        found = [
            passes_per_step(passes, known.steps)
            for known in self._ranks.values()
            if (passes := known.cutter.passes.get(section)) and known.steps
        ]
        return median_of(found) or 1.0
