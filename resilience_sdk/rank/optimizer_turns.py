"""Steps of the user's loop, told from the steps of optimizers that step in turn: a GAN's, one for each kind of weights.

Each optimizer steps once in an iteration, or in some of them only: then an iteration begins where one steps a second
time. One that steps several times in an iteration (`for _ in range(n_critic)`) cannot be told from that by the order
of the steps; the program says it: the call stands in a loop over a range, inside of the loop that both calls stand in.
Where that cannot be seen (calls from one place, other kinds of loops, more turns than an iteration has), the steps of
the first optimizer count.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

from resilience_sdk.attribution.exceptions import is_users_frame

_MAX_FRAMES = 100
_MAX_TURNS = 20  # of one optimizer in an iteration; more are the batches of an epoch
_MAX_OPTIMIZERS = 64
_MAX_CODES = 256
_BACK = 24  # instructions before a loop in which its `range(...)` is made

Place = tuple[tuple[CodeType, int], ...]
"""Where a call comes from: the code of each frame and its instruction, outermost first."""


class OptimizerTurns:
    """Tells of each step of an optimizer whether it is a step of the loop."""

    __slots__ = ("_inner", "_late", "_places", "only", "plain", "stepped", "steps", "surplus")

    def __init__(self) -> None:
        """Nothing has stepped yet."""
        self.only: int | None = None
        """The optimizer that has stepped, while it is the only one: each of its steps counts, in `steps`."""
        self._places: dict[int, Place] = {}
        self._inner: dict[int, frozenset[int]] = {}
        self.steps = 0
        self.stepped: set[int] = set()
        self._late: set[int] = set()
        self.plain: set[int] = set()
        """The optimizers, while none is known that steps several times in an iteration: one begins where one of them
        steps a second time."""
        self.surplus = 0
        """How many of the steps that were counted turned out to be of one iteration; whoever takes them back sets 0."""

    def counts(self, me: int, place: Callable[[], Place]) -> bool:
        """Tell whether this step of optimizer `me` is one of the loop; `place` tells where it was called from."""
        if me == self.only:  # the one that most programs have
            self.steps += 1
            return True
        if me not in self._places:
            self._meet(me, place)
        stepped = self.stepped
        begins = (me not in self._inner or me in self._late) if me in stepped else not stepped
        if begins:
            self.steps += 1
            stepped.clear()
            self._late.clear()
        stepped.add(me)
        if not self._inner:
            return begins
        # An iteration is over for an inner one once an outer one has stepped after it.
        self._late.discard(me)
        for inner, outer in self._inner.items():
            if me in outer and inner in stepped:
                self._late.add(inner)
        return begins

    def _meet(self, me: int, place: Callable[[], Place]) -> None:
        if len(self._places) >= _MAX_OPTIMIZERS:
            self._places = {me: ()}  # one that is made anew in each iteration, say
            self._inner = {}
            self.plain.clear()
            return
        found = place()
        if not self._places:
            self.only = me
            self._places[me] = found
            return
        first, self.only = self.only, None
        if first is not None:
            self.stepped.add(first)
        for other, known in self._places.items():
            is_new = other not in self._inner
            if is_within(known, found) and (not is_new or self.steps <= _MAX_TURNS):
                self._inner[other] = self._inner.get(other, frozenset()) | {me}
                if is_new:  # all that was counted so far was within the first iteration
                    self.surplus = max(0, self.steps - 1)
            if is_within(found, known):
                self._inner[me] = self._inner.get(me, frozenset()) | {other}
        self._places[me] = found
        self.plain.clear()
        if not self._inner:
            self.plain.update(self._places)


def is_within(one: Place, other: Place) -> bool:
    """Tell whether the call at `one` stands in a loop over a range that the one at `other` is outside of.

    Both are within another loop then: what runs once is an iteration of that one.
    """
    for depth, ((code, at), (other_code, other_at)) in enumerate(zip(one, other, strict=False)):
        if code is not other_code:
            return False
        if at != other_at:
            loops = _loops_around(code, at)
            shared = [span for span in loops if span[0] <= other_at <= span[1]]
            inner = [is_range for span, is_range in loops.items() if span not in shared]
            for called, inside in one[depth + 1 :]:
                if is_users_frame(f"{called.co_filename}:1 _"):
                    inner += _loops_around(called, inside).values()
            return bool(shared and inner) and all(inner)
    return False


def _loops_around(code: CodeType, at: int) -> Mapping[tuple[int, int], bool]:
    return {span: is_range for span, is_range in range_loops(code).items() if span[0] <= at <= span[1]}


_known_loops: dict[int, tuple[CodeType, Mapping[tuple[int, int], bool]]] = {}
"""By the identity of a function's code, which is kept for that: its hash alone takes as long as its instructions."""


def range_loops(code: CodeType) -> Mapping[tuple[int, int], bool]:
    """Return the loops of a function by their first and last instruction, and whether each goes over a range.

    Read once: it takes milliseconds, and a program that makes optimizers all the time asks at each of their steps.
    """
    known = _known_loops.get(id(code))
    if known is None or known[0] is not code:
        if len(_known_loops) >= _MAX_CODES:
            _known_loops.clear()
        known = _known_loops[id(code)] = code, _read_loops(code)
    return known[1]


def _read_loops(code: CodeType) -> Mapping[tuple[int, int], bool]:
    instructions = list(dis.get_instructions(code))
    ends: dict[int, int] = {}
    for instruction in instructions:
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs) and instruction.argval < instruction.offset:
            ends[instruction.argval] = max(ends.get(instruction.argval, 0), instruction.offset)
    order = {instruction.offset: number for number, instruction in enumerate(instructions)}
    return {(begin, end): _is_range(instructions, order.get(begin, 0)) for begin, end in ends.items()}


def _is_range(instructions: list[dis.Instruction], head: int) -> bool:
    if instructions[head].opname != "FOR_ITER":
        return False
    for instruction in reversed(instructions[max(0, head - _BACK) : head]):
        if instruction.opname.startswith(("STORE_", "FOR_ITER", "JUMP", "POP_JUMP", "POP_TOP")):
            return False
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if instruction.argval == "range":
                return True
            if instruction.argval in ("enumerate", "zip", "iter", "tqdm"):
                return False
    return False


def call_place() -> Place:
    """Return where the caller's caller was called from; nothing where that is deeper than anybody calls."""
    frame: FrameType | None = sys._getframe(2)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found)) if frame is None else ()
