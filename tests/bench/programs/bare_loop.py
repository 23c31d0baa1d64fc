"""A loop whose data takes next to no time, measured with the sections and then with an adapter around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from paired import on_one_core, paired, tell


class Loader:
    """Gives the same batch for ever."""

    batch = torch.randn(8, 16)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.batch


LOADER = Loader()


class Loop:
    """The training loop, with what was attached to it by `attach`, and on detaching by `instead`."""

    batches = iter(LOADER)

    def __init__(
        self,
        attach: Callable[[], Any],
        instead: Callable[[], object] | None = None,
        through: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        self._handle = attach()
        self._instead = instead
        Loop.batches = through(iter(LOADER))

    def detach(self) -> None:
        """Be without it again."""
        self._handle.detach()
        Loop.batches = iter(LOADER)
        if self._instead is not None:
            self._instead()


def measure(
    step: Callable[[], None],
    sections: Callable[..., Any],
    adapter: Callable[[], Any],
    rounds: int,
    steps: int,
) -> None:
    """Measure the sections beside the bare loop, and beside them the adapter, and what does nothing where it is called.

    `sections` takes what is called at the seams of a step.
    """
    on_one_core()
    torch.set_num_threads(1)
    alone = paired(step, lambda: Loop(sections), rounds, steps)
    sections()
    beside = paired(step, lambda: Loop(adapter, sections), rounds, steps)
    sections()
    seams = {"on_forward": lambda: None, "on_step": lambda: None, "on_step_end": lambda: None}
    through = partial(map, lambda batch: batch)
    empty = paired(step, lambda: Loop(lambda: sections(**seams), sections, through), rounds, steps)
    tell({"step": alone["step"], "sections": alone["added"], "added": beside["added"], "empty": empty["added"]})
