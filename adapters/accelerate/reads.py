"""Reads of the batches of one prepared loader: with which generators, and whether reading draws from them.

Accelerate reads a batch before the one before it is trained on. So the batch that comes behind a save was read before
it, and a resume reads it with the generators of then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from resilience_sdk.adapters._draws import (
    Generators,
    decoded,
    differ,
    encoded,
    has_workers,
)
from resilience_sdk.checkpoint.worker_draws import ALL_OF_FIRST, ONE_OF, DrawnInWorkers
from resilience_sdk.core.resume_limits import note

_END = object()
_OF_BATCHES = ("dataset", "collate_fn")


class Reads:
    """The reads of one loader; of the thread that trains, on each rank by itself."""

    def __init__(self, loader: Any) -> None:
        """Look at the loader, and into its workers if it has some; `None`: at nothing, since nothing is saved."""
        from torch.utils.data import IterableDataset

        self._is_off = loader is None
        self._loader = loader
        self._generators = Generators(loader)
        self._has_workers = has_workers(loader)
        self._is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        self._is_dispatched = any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__)
        self._in_workers = DrawnInWorkers.put_in(loader) if self._has_workers else None
        # Those of samplers are drawn from for an order, which is drawn again.
        self._of_data = [name for name in self._generators.own if {*_OF_BATCHES} & {*name.split(".")}]
        self._draws = bool(self._of_data)
        self._is_known = False
        self._begin: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] | None = None
        """The generators before the newest batch was asked for; None where nobody has looked."""
        self._saved: Mapping[str, Any] = {}
        self._read = self._seen = 0

    def leave(self) -> None:
        """Leave the loader as it was."""
        if self._in_workers is not None:
            self._in_workers.take_out(self._loader)
            self._in_workers = None

    # -- what a checkpoint holds of it

    def state(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        draws = self._draws or (self._in_workers is not None and self._in_workers.seen)
        last = self._last if draws and not self._has_workers and self._read > 1 else None
        own = {name: self._generators.capture()["own"][name] for name in self._of_data}
        return {
            "draws": draws,
            "last": None if last is None else encoded(last),
            "begin": None if self._begin is None else encoded(self._begin),
            "own": encoded(own),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Take what `state` gave, and set the generators of the data as they were then."""
        self._saved = {name: decoded(saved[name]) for name in ("last", "begin", "own") if saved.get(name) is not None}
        self._draws = self._draws or bool(saved["draws"])
        self._begin = self._saved.get("begin")
        self.set_saved()

    def are_made_again(self, done: int) -> bool:
        """Tell whether the reads of a pass are made again: each worker has gone on by itself, or it is not known when.

        The second batch is read in the same breath as the first one.
        """
        return bool(self._saved) and self._draws and not self._is_stream and (self._has_workers or done == 1)

    def has_last(self, done: int) -> bool:
        """Tell whether it is known how the generators were before the batch behind the save was read."""
        return done > 1 and not self._has_workers and "last" in self._saved

    def set_last(self) -> None:
        """Set them so."""
        self._generators.restore(self._saved["last"])

    def set_begin(self) -> None:
        """Set those of the data as they were when the pass began."""
        self._set_own(self._saved.get("begin", {}).get("own", {}))

    def set_saved(self) -> None:
        """Set those of the data as they were at the save; what is read next is read with these."""
        self._set_own(self._saved.get("own", {}))
        self._last = None if self._has_workers else self._generators.capture()

    def _set_own(self, states: Mapping[str, Any]) -> None:
        now = self._generators.capture()
        own = {name: state for name, state in states.items() if name in self._of_data}
        self._generators.restore({**now, "own": own})

    # -- passes

    def begins(self) -> None:
        """Note that a pass begins at its first batch."""
        if self._is_off:
            return
        self._begin, self._read = self._generators.capture(), 0

    def goes_on(self, done: int) -> None:
        """Note that a pass goes on behind the so many batches that were trained on."""
        if done:
            self._read = done
        else:
            self.begins()

    def followed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield these, and know the generators before each read."""
        if self._is_off:
            yield from batches
            return
        is_first = True
        while True:
            self._before(is_first=is_first)
            batch = next(batches, _END)
            if batch is _END:
                return
            self._after(is_first=is_first)
            is_first = False
            yield batch

    def _before(self, *, is_first: bool) -> None:
        self._seen += 1
        is_looked_at = self._draws or self._seen <= ALL_OF_FIRST or not self._seen % ONE_OF
        if is_first:
            return  # see `begins`, or `set_saved`
        self._last = self._generators.capture() if is_looked_at and not self._has_workers else None

    def _after(self, *, is_first: bool) -> None:
        self._read += 1
        # With the first one an order is drawn.
        if not (is_first or self._draws) and self._last is not None:
            self._draws = differ(self._last, self._generators.capture())
        if self._draws and not self._is_known:
            self._is_known = True
            self._note()

    def _note(self) -> None:
        """Say what of this cannot be repeated."""
        cure = "draw from a generator that is seeded by epoch and index"
        if getattr(self._loader, "use_stateful_dataloader", False):
            note(
                "accelerate draws",
                "random numbers that the data set draws where its second batch is next",
                "with use_stateful_dataloader=True Accelerate has read it in the same breath as the first one",
                f"leave use_stateful_dataloader out, or {cure}",
            )
        elif (self._is_stream or self._is_dispatched) and not self._has_workers:
            note(
                "accelerate draws",
                "random numbers of this process that the data set draws",
                "Accelerate reads a batch ahead, so that those of the batch behind a save were drawn before it",
                cure,
            )
