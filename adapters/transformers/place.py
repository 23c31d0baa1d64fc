"""The place of a trainer in its data: which pass, how many batches of it, and the generators that these were made with.

A trainer counts optimizer steps, and finds its place in the data by dividing them. That is wrong where a pass has no
length or was ended early, and it does not say which random numbers the next batch was made with: Accelerate's loaders
fetch one batch ahead, so the batch that is trained next was read before the save, with generators that have gone on
since. So the place is counted here, and what is resumed reads on from an iterator of our own, in which each batch that
was not trained yet is read with the very generators that it was read with before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import attrs

from resilience_sdk.adapters._draws import (
    Announced,
    Generators,
    decoded,
    differ,
    encoded,
    has_workers,
    looks_ahead,
)
from resilience_sdk.adapters._proof import inner_loader, printing
from resilience_sdk.checkpoint.counted_passes import CountedPasses
from resilience_sdk.checkpoint.worker_draws import ALL_OF_FIRST, ONE_OF, DrawnInWorkers
from resilience_sdk.rank.pass_print import PassPrint

__all__ = ["LoaderPlace", "decoded", "encoded", "fingerprint_of", "has_workers", "is_stream", "looks_ahead", "read_on"]

_SAMPLED = 8  # elements of each tensor
_DATA = {"dataset", "data_source", "transform", "collate_fn"}


def is_stream(loader: Any) -> bool:
    """Tell whether a loader can only be read from the beginning."""
    from torch.utils.data import IterableDataset

    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return is_iterable or getattr(loader, "batch_sampler", None) is None


def why_again(loader: Any) -> str:
    """Return why batches that are trained on are read once more at a resume."""
    if is_stream(loader):
        return "a stream begins at its start"
    return f"{'its workers draw' if has_workers(loader) else 'reading them draws'} random numbers"


@attrs.define
class LoaderPlace:
    """The place of one training in its data; of the thread that trains, on each rank by itself."""

    loader: Any
    """The loader of whole passes."""
    epoch: int | None
    """Which pass this is, from 0; None where that is not known."""
    batches: int = 0
    """How many batches of it were handed out."""
    at_begin: dict[str, Any] | None = None
    """The generators before its first batch."""
    at_last: dict[str, Any] | None = None
    """The generators before the batch that was handed out last was asked for."""
    is_at_end: bool = False
    """Whether the pass is over."""
    fingerprint: int = 0
    """Of the batches of a stream so far; 0 for other data, which are found by their indices."""
    generators: Generators = attrs.field(init=False)
    prints: PassPrint = attrs.field(factory=PassPrint)
    """The fingerprint of this pass."""
    told: Callable[[int | None, int, Any], None] | None = None
    """Takes each batch, with the pass and its number in that."""
    left_out: int = 0
    """How many batches of this pass were read, or left out, on the way back to the place."""
    is_begun: bool = False
    """Whether a batch of this pass was read."""
    _is_stream: bool = attrs.field(init=False)
    _foreign: Any = None
    _own: Any = None
    _resumed: Callable[[], Iterator[Any] | None] | None = None
    _number: int = 0
    _seen: int = 0
    _draws: bool = False
    _in_workers: DrawnInWorkers | None = None
    _counted: CountedPasses = attrs.field(factory=CountedPasses)

    def __attrs_post_init__(self) -> None:
        """Find the generators of the data."""
        self.generators, self._is_stream = Generators(self.loader), is_stream(self.loader)
        if has_workers(self.loader):
            self._in_workers = DrawnInWorkers.put_in(self.loader)
        if any(_DATA & {*name.split(".")[:-1]} for name in self.generators.own):
            self._draws = True

    def leave(self) -> None:
        """Leave the loader as it was."""
        if self._in_workers is not None:
            self._draws = self.draws
            self._in_workers.take_out(self.loader)
            self._in_workers = None

    @property
    def draws(self) -> bool:
        """Whether reading a batch was seen to draw random numbers, here or in a worker."""
        return self._draws or (self._in_workers is not None and self._in_workers.seen)

    def expect_draws(self) -> None:
        """Know by a checkpoint that reading a batch draws random numbers."""
        self._draws = True

    def epoch_begins(self) -> None:
        """Begin a pass; the first one is that of the resume."""
        self._counted.look(self.loader)
        if self._number and self.epoch is not None:
            self.epoch += 1
        if self._number:
            self.batches, self.fingerprint, self.at_begin, self.at_last = 0, 0, None, None
            self.left_out = 0  # of the pass before, of which nothing was left
            self._resumed = None  # nothing was left of the pass that was resumed
        self._number += 1
        self.is_at_end = False

    def order_drawn(self) -> None:
        """Note that the order of a pass was drawn."""
        self._counted.look(self.loader)

    def resume_with(self, placed: Callable[[], Iterator[Any] | None], at_begin: dict[str, Any]) -> None:
        """Have the first pass read from what `placed` returns; None: from what the trainer made."""
        self._resumed, self.at_begin = placed, at_begin

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `get_batch_samples` of a trainer such that what it takes is counted."""

        def get_batch_samples(epoch_iterator: Any, *args: Any, **options: Any) -> Any:
            if epoch_iterator is not self._foreign:
                placed, self._resumed = self._resumed, None
                found = None if placed is None else placed()
                self.is_begun = found is not None
                self._foreign = epoch_iterator  # held, so that no other one has its identity
                self._own = _Counted(self, epoch_iterator if found is None else found)
            return method(self._own, *args, **options)

        return get_batch_samples

    def before_batch(self) -> None:
        """Note the generators that the next batch is read with."""
        self._seen += 1
        if not self.batches:
            self.at_begin = self.at_last = self.generators.capture()
        elif self._in_workers is not None:
            self.at_last = None
        elif self._draws or self._seen <= ALL_OF_FIRST or not self._seen % ONE_OF:
            self.at_last = self.generators.capture()
        else:
            self.at_last = None

    def after_batch(self, batch: Any) -> None:
        """Count it, and see whether it drew random numbers."""
        self.batches += 1
        if self.told is not None:
            if self.left_out and self.prints.is_known:
                self.prints.leave_out(self.left_out)
                self.prints.compare(self.epoch or 0, inner_loader(self.loader))
            self.left_out = 0
            self.told(self.epoch, self.batches - 1, batch)
        if self._is_stream:
            self.fingerprint = fingerprint_of(batch, self.fingerprint)
        # The first one draws the order, which is drawn once.
        if not self._draws and self.at_last is not None and self.batches > 1 and self._in_workers is None:
            self._draws = differ(self.at_last, self.generators.capture())


def fingerprint_of(batch: Any, before: int) -> int:
    """Return a number for a batch after those that `before` stands for; the same for the same ones.

    By shapes, and by the first bytes of what is in this memory: a device is not waited for.
    """
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else (batch,)
    for value in values:
        shape = getattr(value, "shape", None)
        if shape is None:
            continue
        before = zlib.crc32(repr((tuple(shape), str(value.dtype))).encode(), before)
        if getattr(value, "is_cpu", False) and not value.dtype.is_complex and value.numel():
            before = zlib.crc32(repr(value.detach().flatten()[:_SAMPLED].tolist()).encode(), before)
    return before


class _Counted:
    """An iterator of batches that counts what it gives."""

    def __init__(self, place: LoaderPlace, batches: Iterator[Any]) -> None:
        self._place, self._batches = place, batches

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        place = self._place
        if place.is_at_end:
            return next(self._batches)
        place.before_batch()
        try:
            if place.is_begun:
                batch = next(self._batches)
            else:
                place.is_begun = True
                with printing(place.prints, place.loader):
                    batch = next(self._batches)
                place.order_drawn()
        except StopIteration:
            place.is_at_end = True
            raise
        place.after_batch(batch)
        return batch


# -- an iterator that begins at a place


def read_on(
    loader: Any,
    epoch: int,
    batches: int,
    *,
    generators: Generators,
    at_begin: Mapping[str, Any],
    at_last: Mapping[str, Any] | None,
    set_saved: Callable[[], None],
    rereads: bool,
    seen: Callable[[Any], object] = id,
    prints: PassPrint | None = None,
) -> Iterator[Any]:
    """Return an iterator that gives what a pass over `loader` gives after its first `batches`.

    `at_begin` and `at_last` are what `LoaderPlace` has seen, `set_saved` sets the generators to those of the save.
    `rereads`: read again what comes before, as for a stream, and show it to `seen`; else it is left out by its indices.
    Raises `StopIteration` where the data end before. `prints`: the fingerprint of the pass.
    """
    prints = PassPrint() if prints is None else prints
    set_epoch(loader, epoch)
    generators.restore(at_begin)
    if rereads:
        whole: Iterator[Any] = iter(loader)
        for number in range(batches):
            if number == batches - 1 and at_last is not None:
                generators.restore(at_last)
            with nullcontext() if number else printing(prints, loader):
                batch = next(whole)
            seen(batch)
        set_saved()
        return whole
    from accelerate import skip_first_batches

    rest: Any = skip_first_batches(loader, batches)
    set_epoch(rest, epoch)
    ahead = int(looks_ahead(loader))
    steps = {batches + ahead: set_saved}
    if ahead and at_last is not None:
        steps[batches] = lambda: generators.restore(at_last)
    announced = None
    if not has_workers(loader):
        announced = Announced.put_in(rest, steps)
    with printing(prints, loader, rest):
        pass  # the order is drawn with the first batch
    return _first_then(iter(rest), lambda: None if announced is not None and announced.is_past else set_saved())


def set_epoch(loader: Any, epoch: int) -> None:
    """Have a loader give the order of this pass, as a trainer asks for it."""
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for one in (loader, sampler):
        if callable(found := getattr(one, "set_epoch", None)):
            found(epoch)


def _first_then(batches: Iterator[Any], then: Callable[[], object]) -> Iterator[Any]:
    """Yield what an iterator gives; call `then` after its first one, or its end."""
    try:
        first = next(batches)
    except StopIteration:
        then()
        return
    then()
    yield first
    yield from batches
