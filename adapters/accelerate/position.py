"""Where a training is in its data: counted in samples, so that another number of ranks finds the place too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resilience_sdk.session.data import find_generators, set_rng, take_rng


class Position:
    """Counts the passes over one prepared loader and the samples in them; of the thread that trains.

    The first pass after a resume is the rest of the epoch that was interrupted. What was read of it is left out by the
    indices of its samples, and not read again. A loader that remembers its place (`use_stateful_dataloader`) does that
    itself.
    """

    def __init__(self, loader: Any, ranks: int, skip: Callable[[Any, int], Any]) -> None:
        """`skip(loader, batches)` returns a loader without its first batches, as Accelerate's own function does."""
        self.epoch = 0
        self.samples = 0
        """Of this epoch, of all ranks together."""
        self.total = 0
        """Samples of all epochs and all ranks together."""
        self._loader = loader
        self._skip = skip
        self._per_batch = samples_per_batch(loader, ranks)
        self._per_epoch = samples_per_epoch(loader)
        self._ranks = ranks
        self._iteration = 0
        self._rng: Any = None
        self._is_resumed = self._is_over = False
        self._restore_rng: Callable[[], None] | None = None

    # -- what a checkpoint holds of it

    def state(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "total": self.total,
            "iteration": self._iteration,
            "is_over": bool(self.samples and getattr(self._loader, "end_of_dataloader", False)),
            "ranks": self._ranks,
            "rng": self._rng,
        }

    def resume(self, saved: Mapping[str, Any], restore_rng: Callable[[], None]) -> None:
        """Take a saved one; `restore_rng()` sets the generators as they were at the save."""
        self.epoch, self.samples, self.total = (int(saved[name]) for name in ("epoch", "samples", "total"))
        self._iteration = int(saved["iteration"])
        self._is_over = bool(saved["is_over"])
        self._rng = saved["rng"]
        self._is_resumed = True
        self._restore_rng = restore_rng

    # -- passes

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of one pass and count them; of the first one after a resume what is left."""
        if self._is_resumed:
            self._is_resumed = False
            batches = self._rest(batches)
        else:
            if self.samples:  # the last pass was left by a break
                self.epoch, self.samples = self.epoch + 1, 0
            self._iteration = int(getattr(self._loader, "iteration", 0))
            self._rng = take_rng(self._generators())
        per_batch, per_epoch = self._per_batch, self._per_epoch
        for batch in batches:
            read = per_batch
            if per_epoch is not None and 0 < per_epoch - self.samples < per_batch:
                read = per_epoch - self.samples  # the last one is filled up with others, or is short
            self.samples += read
            self.total += read
            yield batch
        self.epoch, self.samples, self._rng = self.epoch + 1, 0, None
        self._iteration = int(getattr(self._loader, "iteration", self._iteration + 1))

    def _done(self) -> int:
        """Return how many batches of this epoch, as they are now, have been read as a whole."""
        is_last = self._per_epoch is not None and self.samples >= self._per_epoch
        return -(-self.samples // self._per_batch) if is_last else self.samples // self._per_batch

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        loader, restore_rng = self._loader, self._restore_rng
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._iteration)  # which Accelerate does not save
        if getattr(loader, "use_stateful_dataloader", False):
            if self._is_over:  # it would begin anew
                loader.iteration = self._iteration + 1
                return
            yield from batches
            return
        # The order of an epoch is drawn when its first batch is asked for, as of then; what comes later is drawn as of
        # the save.
        if self._rng is not None:
            set_rng(self._generators(), self._rng)
        else:
            self._rng = take_rng(self._generators())
        done = self._done()
        rest = iter(self._skip(loader, done) if done else batches)
        first = next(rest, _END)
        if done and restore_rng is not None:
            restore_rng()
        if first is not _END:
            yield first
            yield from rest
        if done:
            loader.iteration = self._iteration + 1

    def _generators(self) -> dict[str, Any]:
        found = find_generators(self._loader)
        shared = getattr(self._loader, "synchronized_generator", None)
        if shared is not None and all(shared is not other for other in found.values()):
            found["synchronized"] = shared
        return found


_END = object()


def samples_per_batch(loader: Any, ranks: int) -> int:
    """Return how many samples all ranks together take with one batch each."""
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):  # of an iterable data set there is no sampler that would know
        return int(getattr(loader, "batch_size", None) or 1) * ranks


def samples_per_epoch(loader: Any) -> int | None:
    """Return how many samples one pass has, over all ranks; None where that cannot be told before it ends."""
    batches = getattr(loader, "batch_sampler", None)
    while (inner := getattr(batches, "batch_sampler", None)) is not None:  # a rank's share of all batches
        batches = inner
    try:
        return len(batches.sampler)  # type: ignore[union-attr]
    except (AttributeError, TypeError, NotImplementedError):
        return None
