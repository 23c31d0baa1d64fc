"""Messages of windows between nodes: collected on each, bounded in size and rate, assembled over all ranks. Pure.

Only durations travel. With n nodes, each tells every max(1, n/16) seconds, and of the windows only every 2^i-th, so
that about one falls into that time: all nodes choose the same ones, or some of the same. Where there are more sections
than a message has room for, they take turns.

Who is late is waited for, but not for long: a rank that is dead, slow to report or has no such section must not keep
the others from being judged.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from resilience_sdk.core.json_records import from_text, to_text
from resilience_sdk.recorder.page_layout import WORK
from resilience_sdk.straggler.kernels import KernelWindow
from resilience_sdk.straggler.windowing import (
    COMPARED,
    NOT_SEEN,
    WHOLE_STEP,
    WINDOW_STEPS,
    Amounts,
    PassRate,
    RankCutter,
    Row,
    Section,
    ToldWork,
    first_pass,
    median,
)

MOST_BYTES = 1 << 18
_VALUES = 2048  # durations in a message
_VALUES_IN_ALL = 1 << 17  # the node that gathers them reads no more than that, but for the least
_LEAST_VALUES = 512
_KEPT = 2  # of the newest windows of a section, so that one message may be missed
_RATE_S = 20.0
_ROWS_ALONE = 16  # a second
_MOST_STRIDE = 1 << 20


@attrs.frozen
class Piece:
    """One window of one section on the ranks of one node."""

    name: str
    kind: str
    index: int
    first_step: int
    last_step: int
    passes_per_step: float
    step_s: float | None  # median time of a whole step, where there are heartbeats
    rows: Mapping[int, str]  # rank -> durations in seconds, separated by commas; nothing between two: not known
    work: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    """Amounts of work in these passes, written like durations -> the ranks that have told them: often all the same."""
    is_joint: bool = False  # a rank has seen it hold collectives

    @property
    def section(self) -> Section:
        """Name and kind."""
        return self.name, self.kind

    @property
    def values(self) -> int:
        """How many durations it holds. What is told about them is not counted: it goes with them, or is of no use."""
        return WINDOW_STEPS * len(self.rows)

    def decoded(self) -> dict[int, tuple[float, ...]]:
        """Return rank -> durations; ranks whose text is none are left out."""
        return {rank: row for rank, text in self.rows.items() if (row := read_row(text)) is not None}

    def amounts(self) -> dict[int, tuple[float, ...]]:
        """Return rank -> amounts of work, of those that have told any."""
        rows = ((read_row(text), ranks) for text, ranks in self.work.items())
        return {rank: row for row, ranks in rows if row is not None for rank in ranks}


@attrs.frozen
class NodePieces:
    """The message of one node, the `turn`-th."""

    attempt: int
    node: int
    name: str
    turn: int
    pieces: tuple[Piece, ...]
    roles: Mapping[int, str] = attrs.field(factory=dict)  # of all its ranks
    kernels: Mapping[int, KernelWindow] = attrs.field(factory=dict)
    """Those with the largest part of the time, where kernels are sampled; each window in two messages."""
    urgent: bool = False  # as the bus has it of every message

    def to_text(self) -> str:
        """Return it as one line of JSON."""
        return to_text(self)


def decode(text: str) -> NodePieces | None:
    """Return the message in a text, None where there is none, or too large a one."""
    return from_text(NodePieces, text) if len(text) <= MOST_BYTES else None


def write_row(row: Row) -> str:
    """Return a row, which is in nanoseconds, as `Piece.rows` has it: four digits are enough."""
    return ",".join(["" if value is None else f"{value * 1e-9:.4g}" for value in row])


def write_amounts(amounts: Mapping[int, Amounts | None]) -> dict[str, tuple[int, ...]]:
    """Return what ranks have told as `Piece.work` has it; None: nothing."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, row in amounts.items():
        if row is not None:
            text = ",".join(["" if value is None else f"{value:.6g}" for value in row])
            found[text] = (*found.get(text, ()), rank)
    return found


def read_row(text: str) -> tuple[float, ...] | None:
    """Return the values in a text, NOT_SEEN where there is none; None for what is no row of a window."""
    values = text.split(",")
    try:
        row = tuple(float(value) if value else NOT_SEEN for value in values)
    except ValueError:
        return None
    told = [value for value, written in zip(row, values, strict=True) if written]
    return row if len(row) == WINDOW_STEPS and all(0.0 <= value < math.inf for value in told) else None


def pace_s(nodes: int) -> float:
    """Return how often a node tells, in seconds."""
    return max(1.0, nodes / 16)


def room_of(nodes: int) -> int:
    """Return how many durations a message of one of `nodes` nodes may hold."""
    return max(_LEAST_VALUES, min(_VALUES, _VALUES_IN_ALL // nodes))


def chosen(pieces: Iterable[Piece], nodes: int) -> tuple[Piece, ...]:
    """Return the pieces that fit into a message of one of `nodes` nodes: the newest of each section first."""
    room = room_of(nodes)
    by_section: dict[Section, list[Piece]] = {}
    for piece in pieces:
        by_section.setdefault(piece.section, []).append(piece)
    newest = [sorted(of_one, key=lambda piece: -piece.index)[:_KEPT] for of_one in by_section.values()]
    found: list[Piece] = []
    for age in range(_KEPT):
        for of_one in newest:
            if age < len(of_one) and (not found or of_one[age].values <= room):
                found.append(of_one[age])
                room -= of_one[age].values
    return tuple(sorted(found, key=lambda piece: piece.index))


class Thinning:
    """Leaves out windows where they come faster than they can be told and judged."""

    def __init__(self, nodes: int) -> None:
        """Let through about one window of a section per `pace_s(nodes)`; a node alone may take twice that (`share`)."""
        self._pace_s = pace_s(nodes)
        self._room = room_of(nodes) if nodes > 1 else None
        self._shared: tuple[frozenset[Section], int] = frozenset(), 0
        self._turns = 1
        self._since: dict[Section, tuple[float, int]] = {}
        self._stride: dict[Section, int] = {}

    def share(self, sections: Iterable[Section], values: int) -> None:
        """Let sections take turns whose windows have `values` durations each, where a message has no room for all.

        All nodes must tell the same window of a section, and have no way to agree: whose turn it is follows from
        the number of the window and the name of the section. The number of turns is a power of two, so that a node
        with more sections than the others tells some of the same windows.

        A node alone tells nobody. It judges less often what has many rows, of which each costs its monitor CPU time.
        """
        shared = frozenset(sections), values
        if shared == self._shared:
            return
        self._shared = shared
        if self._room is None:
            rows = len(shared[0]) * values / WINDOW_STEPS
            self._pace_s = pace_s(1) * min(2.0, max(1.0, rows / _ROWS_ALONE))
            return
        at_once, most = max(1, self._room // max(1, values)), 16 * len(shared[0])
        self._turns = 1
        while self._turns < most and max(Counter(map(self._turn, shared[0])).values()) > at_once:
            self._turns *= 2

    def _turn(self, section: Section) -> int:
        return zlib.crc32("/".join(section).encode()) % self._turns

    def stride(self, section: Section) -> int:
        """Return by what the number of a window must be divisible to count."""
        return self._stride.get(section, 1)

    def lets_through(self, section: Section, index: int, now_s: float) -> bool:
        """Tell whether a window is one of those that count; `now_s` is any steady clock of this host."""
        began_s, first = self._since.setdefault(section, (now_s, index))
        past_s = now_s - began_s
        if past_s >= 1.0 and index > first:
            wanted = self._pace_s * (index - first) / past_s
            self._stride[section] = min(_MOST_STRIDE, 1 << max(0, math.ceil(math.log2(wanted) - 0.1)))
            if past_s > _RATE_S:
                self._since[section] = now_s, index
        number, rest = divmod(index, self.stride(section))
        return rest == 0 and number % self._turns == self._turn(section)


PATIENCE = 3
"""So many windows of a section may be waiting for somebody; then the oldest is taken without."""

Part = TypeVar("Part")


@attrs.define
class _Pending(Generic[Part]):
    parts: dict[int, dict[int, Part]] = attrs.field(factory=dict)
    newest: dict[int, int] = attrs.field(factory=dict)
    """Of those that are waited for, the number of the last window; -1: there was none."""
    done: int = -1


class Assembly(Generic[Part]):
    """Gathers the parts of windows, by section and number; whose part it is, a number tells (a rank, or a node)."""

    def __init__(self, members: Iterable[int], *, realign: bool = False) -> None:
        """Wait for `members` first. `realign`: count anew for one that has fallen behind, as who began again has.

        Then its next window is taken for the one that comes next for the others.
        """
        self._members = set(members)
        self._realign = realign
        self._shift: dict[tuple[int, Section], int] = {}
        self._sections: dict[Section, _Pending[Part]] = {}

    def expect(self, member: int) -> None:
        """Wait for this one too, in sections that begin from now on."""
        self._members.add(member)

    def forget(self, member: int) -> None:
        """Wait for one no more: it is gone, or begins anew."""
        self._members.discard(member)
        self._shift = {key: shift for key, shift in self._shift.items() if key[0] != member}
        for pending in self._sections.values():
            pending.newest.pop(member, None)

    def offer(self, member: int, section: Section, index: int, part: Part) -> None:
        """Take a part of one window; where it comes too late it is dropped."""
        pending = self._sections.get(section)
        if pending is None:
            pending = self._sections[section] = _Pending(newest=dict.fromkeys(self._members, -1))
        index += self._shift.get((member, section), 0)
        if index <= pending.done:
            if not self._realign:
                return
            behind = 1 + pending.done - index
            self._shift[member, section] = self._shift.get((member, section), 0) + behind
            index += behind
        pending.parts.setdefault(index, {})[member] = part
        pending.newest[member] = max(index, pending.newest.get(member, -1))

    def take(self) -> list[tuple[Section, int, dict[int, Part]]]:
        """Return the windows that are complete, or can wait no more, oldest first."""
        ready = []
        for section, pending in self._sections.items():
            for index in sorted(pending.parts):
                behind = [member for member, newest in pending.newest.items() if newest < index]
                if behind and len(pending.parts) <= PATIENCE:
                    break
                for member in behind:
                    del pending.newest[member]
                ready.append((section, index, pending.parts.pop(index)))
                pending.done = index
        return ready


# -- one node

_IGNORED = ("idle",)
_NANO = 1e9
_USUAL = "step"  # the name of a heartbeat that was given none


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
    is_late: bool  # it began when others had come far, so that its windows are counted anew (`Assembly`)
    cutter: RankCutter = attrs.field(factory=RankCutter)
    told: ToldWork = attrs.field(factory=ToldWork)
    rates: dict[Section, PassRate] = attrs.field(factory=dict)
    beat: Section | None = None  # the heartbeat that tells its steps
    steps: int = 0  # heartbeats that it has completed; 0 where nothing tells
    steps_ns: deque[int] = attrs.field(factory=lambda: deque(maxlen=WINDOW_STEPS))
    _began: dict[Section, int] = attrs.field(factory=dict)
    _steps_before: int = 0

    def note(self, section: Section, start: int, durations_ns: Sequence[int], before: int) -> None:
        """Take completed passes. Of several heartbeats, as of an evaluation, one tells: the usual, or the first."""
        began = max(start, min(before, start + len(durations_ns)))
        self._began.setdefault(section, began)
        if section[1] not in WHOLE_STEP:
            return
        if self.beat is None or _tells_steps(section) > _tells_steps(self.beat):
            self.beat = section
            self.steps = self._steps_before = began
            self.steps_ns.clear()
        if section == self.beat:
            self.steps = start + len(durations_ns)
            self.steps_ns.extend(durations_ns[max(0, first_pass(0, before) - start) :][-WINDOW_STEPS:])

    def count(self) -> None:
        """Take the counts of this moment, when all that was completed has been added."""
        for section, start in self._began.items():
            rate = self.rates.get(section)
            if rate is None:
                rate = self.rates[section] = PassRate(start, self._steps_before)
            rate.note(self.cutter.passes[section], self.steps)
        self._steps_before = self.steps


class Collector:
    """The ranks of one node in one attempt: their durations cut, aligned and thinned. The monitor reads the pages."""

    def __init__(self, nodes: int) -> None:
        """Collect as one of `nodes` nodes."""
        self._ranks: dict[int, _Rank] = {}
        self._assembly: Assembly[tuple[Row, Amounts | None]] = Assembly((), realign=True)
        self._thinning = Thinning(nodes)
        self._has_taken = False
        self._joint: set[str] = set()

    def present(self, processes: Mapping[int, Hashable]) -> None:
        """Note the living ranks and what tells their processes apart: another process begins anew."""
        for rank in [rank for rank, known in self._ranks.items() if processes.get(rank) != known.process]:
            del self._ranks[rank]
            self._assembly.forget(rank)
        for rank, process in processes.items():
            if rank not in self._ranks:
                self._ranks[rank] = _Rank(process, self._has_taken)
                self._assembly.expect(rank)

    def add(
        self,
        rank: int,
        name: str,
        kind: str,
        lane: int,
        start: int,
        durations_ns: Sequence[int],
        *,
        is_joint: bool = False,
        before: int | None = 0,
    ) -> None:
        """Take completed passes of a rank that is present; `start` is the number of the first since it began.

        `before`: how many came before its first step was complete; None: that is still to come, and they count for
        nothing. `is_joint`: the rank has seen it hold collectives; then its time on the device does, too. The amounts
        of work that it has told come first, and are the words of the page.
        """
        known = self._ranks.get(rank)
        if known is None or kind in _IGNORED:
            return
        if kind == WORK:
            known.told.add(name, start, durations_ns)
            return
        if before is None:
            return
        if is_joint:
            self._joint.add(name)
        section = (name, kind)
        known.note(section, start, durations_ns, before)
        every = 1 if known.is_late else self._thinning.stride(section)
        for index, row in known.cutter.add(section, lane, start, durations_ns, every, before):
            first = first_pass(index, before)
            amounts = known.told.of(first, known.cutter.passes[section]) if kind in COMPARED else None
            self._assembly.offer(rank, section, index, (row, amounts))

    def take(self, first_step: int, now_s: float) -> list[Piece]:
        """Return the windows that are complete on this node; `first_step` is the step that began the attempt."""
        for known in self._ranks.values():
            known.count()
        complete = self._assembly.take()
        self._has_taken = self._has_taken or bool(complete)
        sections = {section for known in self._ranks.values() for section in known.rates}
        if any(kind in COMPARED for _, kind in sections):  # beside these the step as a whole would only take room
            sections = {section for section in sections if section[1] not in WHOLE_STEP}
        self._thinning.share(sections, WINDOW_STEPS * len(self._ranks))
        return [
            self._piece(section, index, passed, first_step)
            for section, index, passed in complete
            if section in sections and self._thinning.lets_through(section, index, now_s)
        ]

    def _piece(
        self, section: Section, index: int, passed: Mapping[int, tuple[Row, Amounts | None]], first_step: int
    ) -> Piece:
        passing = [known for known in self._ranks.values() if section in known.rates and known.steps]
        rates = [known.rates[section] for known in passing]
        firsts = [known.cutter.first_pass(section, index) for known in passing]
        steps = sorted(
            (rate.step_of(first), rate.step_of(first + WINDOW_STEPS - 1))
            for rate, first in zip(rates, firsts, strict=True)
        )
        first = first_pass(index)
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
            rows={rank: write_row(row) for rank, (row, _) in passed.items()},
            work=write_amounts({rank: amounts for rank, (_, amounts) in passed.items()}),
            is_joint=section[0] in self._joint and section[1] in COMPARED,
        )
