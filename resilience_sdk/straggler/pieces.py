"""What a node tells about the durations of its ranks: the newest windows, bounded in size and rate. Pure.

Only durations travel. With n nodes, each tells every max(1, n/16) seconds, and of the windows only every 2^i-th, so
that about one falls into that time: all nodes choose the same ones, or some of the same. Where there are more sections
than a message has room for, they take turns.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from resilience_sdk.straggler.cutting import Row, Section
from resilience_sdk.straggler.kernels import KernelWindow
from resilience_sdk.straggler.window import WINDOW_STEPS
from resilience_sdk.wire import from_text, to_text

MOST_BYTES = 1 << 18
_VALUES = 2048  # durations in a message
_VALUES_IN_ALL = 1 << 17  # the node that gathers them reads no more than that, but for the least
_LEAST_VALUES = 512
_KEPT = 2  # of the newest windows of a section, so that one message may be missed
_RATE_S = 20.0
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
    step_s: float | None
    """Median time of a whole step, where there are heartbeats."""
    rows: Mapping[int, str]
    """Rank -> durations in seconds, separated by commas; nothing between two where it is not known."""
    work: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    """Amounts of work in these passes, written like durations -> the ranks that have told them: often all the same."""

    @property
    def section(self) -> Section:
        """Name and kind."""
        return self.name, self.kind

    @property
    def values(self) -> int:
        """How many durations it holds. What is told about them is not counted: it goes with them, or is of no use."""
        return WINDOW_STEPS * len(self.rows)

    def decoded(self) -> dict[int, tuple[float | None, ...]]:
        """Return rank -> durations; ranks whose text is none are left out."""
        found = {}
        for rank, text in self.rows.items():
            row = read_row(text)
            if row is not None:
                found[rank] = row
        return found

    def amounts(self) -> dict[int, tuple[float | None, ...]]:
        """Return rank -> amounts of work, of those that have told any."""
        rows = ((read_row(text), ranks) for text, ranks in self.work.items())
        return {rank: row for row, ranks in rows if row is not None for rank in ranks}


@attrs.frozen
class NodePieces:
    """The message of one node."""

    attempt: int
    node: int
    name: str
    turn: int
    """One more with each message."""
    pieces: tuple[Piece, ...]
    roles: Mapping[int, str] = attrs.field(factory=dict)
    """Of all its ranks."""
    kernels: Mapping[int, KernelWindow] = attrs.field(factory=dict)
    """Those with the largest part of the time, where kernels are sampled; each window in two messages."""
    urgent: bool = False

    def to_text(self) -> str:
        """Return it as one line of JSON."""
        return to_text(self)


def decode(text: str) -> NodePieces | None:
    """Return the message in a text, None where there is none, or too large a one."""
    return from_text(NodePieces, text) if len(text) <= MOST_BYTES else None


def write_row(row: Row) -> str:
    """Return a row, which is in nanoseconds, as `Piece.rows` has it: four digits are enough."""
    return ",".join(["" if value is None else f"{value * 1e-9:.4g}" for value in row])


def write_amounts(amounts: Mapping[int, Sequence[float | None] | None]) -> dict[str, tuple[int, ...]]:
    """Return what ranks have told as `Piece.work` has it; None: nothing."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, row in amounts.items():
        if row is not None:
            text = ",".join(["" if value is None else f"{value:.6g}" for value in row])
            found[text] = (*found.get(text, ()), rank)
    return found


def read_row(text: str) -> tuple[float | None, ...] | None:
    """Return the durations in a text, in seconds; None for what is no row of a window."""
    try:
        row = tuple(float(value) if value else None for value in text.split(","))
    except ValueError:
        return None
    is_row = len(row) == WINDOW_STEPS and all(value is None or 0.0 <= value < math.inf for value in row)
    return row if is_row else None


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
        """Let through about one window of a section per `pace_s(nodes)`."""
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
        """
        shared = frozenset(sections), values
        if self._room is None or shared == self._shared:
            return
        self._shared = shared
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
