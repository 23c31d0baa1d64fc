"""Ranks that have different numbers of batches: `accelerator.join_uneven_inputs`, and loops that would need it.

Inside of it ranks that are through stand in for themselves in the collectives of those that are not, and in no others.
So as long as it lasts nothing is agreed, and what is due is done together at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from resilience_sdk.adapters.accelerate.stand_in import StandIn
from resilience_sdk.adapters.pytorch import Attached
from resilience_sdk.checkpoint.ranks import find_ranks
from resilience_sdk.console import say_once
from resilience_sdk.straggler import section

_MOST_WAIT_S = 7200.0
"""For the ranks that have more batches. In a pause, which has no end, it would not be found if one of them hangs."""


class Uneven:
    """Watches over the steps of one accelerator, on all ranks; `restore()` ends that. The thread that trains."""

    def __init__(self, accelerator: Any, loop: Attached, loader: Any) -> None:
        """Stand in for `join_uneven_inputs`. Collective where there are several ranks."""
        self._loop = loop
        self._plain = accelerator.join_uneven_inputs
        self._is_joined = False
        self._batches = _numbers_of_batches(loader)
        self.restore = StandIn(accelerator, join_uneven_inputs=self.join_uneven_inputs).restore
        """Gives the accelerator its own method back. May be repeated."""

    def pass_begins(self) -> None:
        """Say what will happen where ranks have different numbers of batches and nothing joins them."""
        if len(self._batches) > 1 and not self._is_joined:
            say_once(
                "uneven",
                f"attach: ranks have different numbers of batches ({self._batches}), and will wait for one another "
                "without an end: write `with accelerator.join_uneven_inputs([model]):` around the pass, or leave out "
                "even_batches=False",
            )

    @contextmanager
    def join_uneven_inputs(self, *args: Any, **options: Any) -> Iterator[None]:
        """As `Accelerator.join_uneven_inputs`; at its end all ranks have taken as many steps as the one with most."""
        with ExitStack() as wait, self._plain(*args, **options):
            self._is_joined = True
            try:
                with self._loop.apart():
                    yield
            finally:
                self._is_joined = False
            wait.enter_context(section("join_wait", kind="comm", timeout=_MOST_WAIT_S))
        self._loop.meet(find_ranks().gather)


def _numbers_of_batches(loader: Any) -> list[int]:
    """Return which numbers of batches the ranks have in a pass, as far as that is known. Collective."""
    try:
        own: int | None = len(loader)
    except (TypeError, NotImplementedError):
        own = None
    return sorted({number for number in find_ranks().gather(own) if number is not None})
