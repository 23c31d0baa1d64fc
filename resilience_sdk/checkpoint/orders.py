"""Orders that a sampler draws as soon as it is asked for an iterator: a loader that goes back must draw no other one.

torchdata's loader makes its iterator as for a new pass, and then asks the same sampler once or twice more. A sampler
that draws in `__iter__` itself, from a generator of its own or from that of the process, would have drawn the order of
another pass by then. So it is asked each time with the generators as they were when the pass began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs

from resilience_sdk.checkpoint.generators import find_generators, parts, set_rng, take_rng
from resilience_sdk.core.iterated_class import iterated_by, set_class

_SAMPLERS = ("sampler", "batch_sampler", "inner_sampler")


@contextlib.contextmanager
def same_order(loader: Any) -> Iterator[None]:
    """Have torchdata's loader go back to a state in the order that it had; around the making of its iterator."""
    if not getattr(loader, "next_iter_state", None):
        yield
        return
    samplers = [part for name, part in parts(loader) if name in _SAMPLERS]
    for_new_pass = 2 if getattr(loader, "num_workers", 0) else 1  # how often a new pass asks for an iterator
    with contextlib.ExitStack() as stack:
        for sampler in samplers:
            plain = type(sampler)
            # A range or a list has a class that cannot be exchanged, and draws nothing.
            with contextlib.suppress(TypeError):
                set_class(sampler, iterated_by(plain, _Asked(plain, find_generators(loader), for_new_pass).iterator()))
                stack.callback(set_class, sampler, plain)
        yield


@attrs.define
class _Asked:
    """One sampler while a loader goes back."""

    plain: Any
    generators: dict[str, Any]
    for_new_pass: int
    times: int = 0
    before: dict[str, Any] | None = None
    """The generators of before the order was drawn; None where nothing was drawn with the iterator."""

    def iterator(self) -> Any:
        """Return what makes the iterators; a function, so that it is given the sampler."""
        return lambda sampler: self._ask(sampler)

    def _ask(self, sampler: Any) -> Iterator[Any]:
        self.times += 1
        now = take_rng(self.generators)
        if self.times > self.for_new_pass:
            if self.before is None:
                return self._made(sampler)
            set_rng(self.generators, self.before)
            made = self._made(sampler)
            set_rng({}, {**now, "generators": {}})  # what the process draws behind its order is drawn once
            return made
        made = self._made(sampler)
        self.before = now if take_rng(self.generators) != now else None
        return made

    def _made(self, sampler: Any) -> Iterator[Any]:
        made: Iterator[Any] = self.plain.__iter__(sampler)
        return made
