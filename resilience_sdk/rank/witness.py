"""The witness of one step: its place, its samples, its batches, learning rates, generators, some of the weights.

It costs some microseconds, changes nothing that it looks at, and never waits for a device.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from array import array
from binascii import crc32
from collections.abc import Iterable
from typing import Any

from resilience_sdk.rank.fingerprints import bytes_of
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.recorder.witness_ring import CONTENT, FIXED, GENERATORS, ORDER, RATES, UNPLACED, WEIGHTS

LOOKED_AT = 2
"""Steps behind a save whose generators are looked at."""
_MAX_GROUPS = 64
_CHUNKS_OF_WEIGHT = 2

Parts = tuple[int, int, int, int, int, int, int, int, int, float, int]
"""The fields of a `WitnessedStep` but its loss, in their order."""


class StepInMaking:
    """What is known of the step that is under way, from its first batch on; of the thread that trains."""

    __slots__ = ("_before", "_content", "_generators", "_order", "_place", "_prints", "_rates", "_seen",
                 "_shapes", "looks_at_generators", "optimizers")  # fmt: skip

    def __init__(self, prints: PassPrint, optimizers: Iterable[Any]) -> None:
        """Know of no step. `prints` knows the samples of the newest batch."""
        self._prints = prints
        self.optimizers = tuple(optimizers)
        """Those whose learning rates count."""
        self.looks_at_generators = LOOKED_AT
        """In how many of the next steps."""
        self._place: tuple[int, int] | None = None
        self._seen = self._shapes = self._order = self._content = self._generators = 0
        self._rates = 0, 0.0
        self._before: Any = None
        """What was known before the newest batch."""

    def add(self, epoch: int | None, number: int, batch: Any) -> None:
        """Take a batch of the step: that of this number in its epoch. Raises what somebody else's batch raises.

        Where nobody knows the epoch, how many batches the step has takes the place of the number.
        """
        prints, seen = self._prints, CONTENT
        self._before = (self._place, self._seen, self._shapes, self._order, self._content, self.looks_at_generators)
        shapes, content = prints.content_of(batch)
        order = prints.newest_order
        if order is not None:
            seen |= ORDER
        elif prints.is_fixed:
            seen |= FIXED
        if self._place is not None:  # one more of a step that adds up gradients
            self._seen = seen & self._seen | self._seen & ~(CONTENT | ORDER | FIXED)
            self._shapes = _both(self._shapes, shapes)
            self._content = _both(self._content, content)
            self._order = _both(self._order, order or 0)
            if self._seen & UNPLACED:
                self._place = 0, self._place[1] + 1
            return
        self._shapes, self._content, self._order = shapes, content, order or 0
        rates = rates_of(self.optimizers)
        if rates is not None:
            seen |= RATES
        self._rates = rates or (0, 0.0)
        self._generators = 0
        if self.looks_at_generators:
            self.looks_at_generators -= 1
            self._generators, seen = print_of_generators(), seen | GENERATORS
        self._seen, self._place = (seen | UNPLACED, (0, 1)) if epoch is None else (seen, (epoch, number))

    def take(self, step: int) -> Parts | None:
        """Return the witness of that step, whose batches were added, and begin the next one; None: there were none."""
        place, self._place, self._before = self._place, None, None
        if place is None:
            return None
        rates, rate = self._rates
        weights = print_of_weights(self.optimizers)
        seen = self._seen if weights is None else self._seen | WEIGHTS
        return (step, *place, seen, self._shapes, self._order, self._content, rates, weights or 0, rate,
                self._generators)  # fmt: skip

    def undo(self) -> None:
        """Leave out the newest batch: nothing was made of it."""
        before, self._before = self._before, None
        if before is not None:
            self._place, self._seen, self._shapes, self._order, self._content, self.looks_at_generators = before

    def drop(self) -> None:
        """Forget batches that make no step."""
        self._place = self._before = None


def _both(before: int, now: int) -> int:
    """Return a number for two. As the seed of a CRC the first would cancel the second where both differ alike."""
    return crc32(struct.pack("<QQ", before, now))


def rates_of(optimizers: Iterable[Any]) -> tuple[int, float] | None:
    """Return a number for the learning rates of the groups, and the first; None where one lies on a device.

    Of an optimizer with a group for each parameter 64, evenly spread: it is done in each step.
    """
    rates = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if len(groups) > _MAX_GROUPS:
            groups = groups[:: -(-len(groups) // _MAX_GROUPS)]
        for group in groups:
            rate = group.get("lr", 0.0)
            if type(rate) is not float:
                if getattr(rate, "is_cpu", True) is False:
                    return None
                rate = float(rate)
            rates.append(rate)
    return (crc32(array("d", rates)), rates[0]) if rates else None


def print_of_weights(optimizers: Iterable[Any]) -> int | None:
    """Return a number for some bytes of the first and the last weight of each optimizer; None where none is here.

    Those that lie on the CPU in one piece, and as a whole: a device is not waited for. Not of gradients: what is left
    over of them a resume need not have.
    """
    found = None
    for optimizer in optimizers:
        groups = optimizer.param_groups
        for group, at in ((groups[0], 0), (groups[-1], -1)) if groups else ():
            weights = group["params"]
            if weights and type(weights[at]) in _plain_tensors() and (data := bytes_of(weights[at], _CHUNKS_OF_WEIGHT)):
                found = crc32(data, found or 0)
    return found


@functools.cache
def _plain_tensors() -> frozenset[type]:
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))


def print_of_generators() -> int:
    """Return a number for the generators of this process, as quick as it can be: it may be that of every step."""
    _, words, gauss = random.getstate()
    found = crc32(array("Q", words), crc32(repr(gauss).encode()))
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        _, keys, *others = numpy.random.get_state(legacy=True)
        found = crc32(keys.tobytes(), crc32(repr(tuple(map(float, others))).encode(), found))
    if torch is not None:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())  # kept on the host
        for state in states:
            found = crc32(ctypes.string_at(state.data_ptr(), state.numel()), found)
    return found
