"""The place of a trainer in its data: which pass, how many batches of it, and the generators that these were made with.

A trainer counts optimizer steps, and finds its place in the data by dividing them. That is wrong where a pass has no
length or was ended early, and it does not say which random numbers the next batch was made with: Accelerate's loaders
fetch one batch ahead, so the batch that is trained next was read before the save, with generators that have gone on
since. So the place is counted here, and what is resumed reads on from an iterator of our own, in which each batch that
was not trained yet is read with the very generators that it was read with before.
"""

from __future__ import annotations

import base64
import contextlib
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from resilience_sdk.checkpoint.generators import generators_below

States = Mapping[str, Any]
"""The states of generators by their names, as a JSON value."""

_MAX_DEPTH = 5
_WAYS = {"base_dataloader", "batch_sampler", "sampler", "data_source"}
_OF_BATCHES = {"dataset", "transform", "collate_fn"}
_SAMPLED = 8  # elements of each tensor
_DATA = {"dataset", "data_source", "transform", "collate_fn"}
# Python's and NumPy's generators cost 40 us to read: at each of the first batches, then, as long as none draws, at few.
_ALL_OF_FIRST = 32
_ONE_OF = 16


class Generators:
    """The generators that reading a batch may draw from: those of the process, and what the data hold themselves."""

    def __init__(self, loader: Any = None) -> None:
        """Find those of a loader; `None`: those of the process alone."""
        self.own: dict[str, Any] = {} if loader is None else dict(_find(loader))

    def capture(self) -> dict[str, Any]:
        """Return their states, as they are in memory: quick, and for `restore` alone."""
        import numpy as np
        import torch

        own = {name: _get(one) for name, one in self.own.items()}
        # One by one, not for CUDA: a device draws nothing for data, and to ask it would wait for it.
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "own": own,
        }

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set them to states from `capture` or `decoded`; those that are not here any more are left out."""
        import numpy as np
        import torch

        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        for name, state in states["own"].items():
            if name in self.own:
                _set(self.own[name], state)


def encoded(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of `Generators` as a JSON value."""
    return {name: _encode(value) for name, value in states.items()}


def decoded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `encoded` was given; raises `ValueError`, `KeyError` or `TypeError` for something else."""
    return {name: _decode(one) for name, one in value.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"map": {name: _encode(one) for name, one in value.items()}}
    if isinstance(value, (tuple, list)):
        if all(type(one) is int for one in value):
            return {"ints": list(value)}
        return {"tuple": [_encode(one) for one in value]}
    if hasattr(value, "numpy"):
        return {"tensor": base64.b64encode(value.cpu().numpy().tobytes()).decode("ascii")}
    if hasattr(value, "dtype") and getattr(value, "shape", None):
        return {"array": [str(value.dtype), base64.b64encode(value.tobytes()).decode("ascii")]}
    if hasattr(value, "item"):
        return value.item()
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "map":
        return {name: _decode(one) for name, one in inner.items()}
    if kind == "ints":
        return tuple(inner)
    if kind == "tuple":
        return tuple(_decode(one) for one in inner)
    if kind == "array":
        import numpy as np

        return np.frombuffer(base64.b64decode(inner[1]), dtype=inner[0]).copy()
    if kind == "tensor":
        import torch

        return torch.frombuffer(bytearray(base64.b64decode(inner)), dtype=torch.uint8).clone()
    raise ValueError(f"{kind!r} is no kind of state")


def _find(owner: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the generators that an object holds, by the way to them."""
    if depth > _MAX_DEPTH or owner is None:
        return
    held = getattr(owner, "__dict__", None)
    if not isinstance(held, dict):
        return
    for name, value in list(held.items()):
        where = f"{path}.{name}" if path else name
        if _is_generator(value):
            yield where, value
        elif name in _OF_BATCHES:
            yield from generators_below(value, where)
        elif name in _WAYS:
            yield from _find(value, where, depth + 1)


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    torch, np = sys.modules["torch"], sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return True
    return np is not None and isinstance(value, (np.random.Generator, np.random.RandomState))


def _get(one: Any) -> Any:
    if isinstance(one, random.Random):
        return one.getstate()
    if hasattr(one, "bit_generator"):
        return one.bit_generator.state
    return one.get_state(legacy=False) if hasattr(one, "randint") else one.get_state()


def _set(one: Any, state: Any) -> None:
    if isinstance(one, random.Random):
        one.setstate(state)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = state
    else:
        one.set_state(state)


def looks_ahead(loader: Any) -> bool:
    """Tell whether a loader reads one batch ahead of the one that it gives, as those of Accelerate do."""
    return any(kind.__name__ in ("DataLoaderShard", "DataLoaderDispatcher") for kind in type(loader).__mro__)


def has_workers(loader: Any) -> bool:
    """Tell whether other processes read for a loader."""
    return bool(getattr(loader, "num_workers", 0))


def is_stream(loader: Any) -> bool:
    """Tell whether a loader can only be read from the beginning."""
    from torch.utils.data import IterableDataset

    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return is_iterable or getattr(loader, "batch_sampler", None) is None


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
    _is_stream: bool = attrs.field(init=False)
    _foreign: Any = None
    _own: Any = None
    _resumed: Callable[[], Iterator[Any] | None] | None = None
    _number: int = 0
    _seen: int = 0
    _draws: bool = False
    _in_workers: DrawsInWorkers | None = None

    def __attrs_post_init__(self) -> None:
        """Find the generators of the data."""
        self.generators, self._is_stream = Generators(self.loader), is_stream(self.loader)
        if has_workers(self.loader):
            self._in_workers = DrawsInWorkers.put_in(self.loader)
        elif any(_DATA & {*name.split(".")[:-1]} for name in self.generators.own):
            self._draws = True

    @property
    def draws(self) -> bool:
        """Whether reading a batch was seen to draw random numbers, here or in a worker."""
        return self._draws or (self._in_workers is not None and self._in_workers.seen)

    def expect_draws(self) -> None:
        """Know by a checkpoint that reading a batch draws random numbers."""
        self._draws = True

    def epoch_begins(self) -> None:
        """Begin a pass; the first one is that of the resume."""
        if self._number and self.epoch is not None:
            self.epoch += 1
        if self._number:
            self.batches, self.fingerprint, self.at_begin, self.at_last = 0, 0, None, None
            self._resumed = None  # nothing was left of the pass that was resumed
        self._number += 1
        self.is_at_end = False

    def resume_with(self, placed: Callable[[], Iterator[Any] | None], at_begin: dict[str, Any]) -> None:
        """Have the first pass read from what `placed` returns; None: from what the trainer made."""
        self._resumed, self.at_begin = placed, at_begin

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `get_batch_samples` of a trainer such that what it takes is counted."""

        def get_batch_samples(epoch_iterator: Any, *args: Any, **options: Any) -> Any:
            if epoch_iterator is not self._foreign:
                placed, self._resumed = self._resumed, None
                found = None if placed is None else placed()
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
        elif self._draws or self._seen <= _ALL_OF_FIRST or not self._seen % _ONE_OF:
            self.at_last = self.generators.capture()
        else:
            self.at_last = None

    def after_batch(self, batch: Any) -> None:
        """Count it, and see whether it drew random numbers."""
        self.batches += 1
        if self._is_stream:
            self.fingerprint = fingerprint_of(batch, self.fingerprint)
        # The first one draws the order, which is drawn once.
        if not self._draws and self.at_last is not None and self.batches > 1 and self._in_workers is None:
            self._draws = _differ(self.at_last, self.generators.capture())


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


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    import torch

    if one["python"] != other["python"] or not torch.equal(one["torch"], other["torch"]):
        return True
    first, second = one["numpy"]["state"], other["numpy"]["state"]
    return bool(first["pos"] != second["pos"] or (first["key"] != second["key"]).any())


class DrawsInWorkers:
    """What makes batches of samples in the workers of a loader, and sees whether that draws random numbers there."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        """Go around the loader's own."""
        import torch

        self._collate = collate
        self._flag = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._calls = 0
        self._before: dict[str, Any] | None = None

    @classmethod
    def put_in(cls, loader: Any) -> DrawsInWorkers | None:
        """Put it into a loader that has workers; None where that is no loader of torch."""
        from torch.utils.data import DataLoader

        base = getattr(loader, "base_dataloader", loader)
        if not isinstance(base, DataLoader):
            return None
        if not isinstance(base.collate_fn, cls):
            with contextlib.suppress(OSError, RuntimeError):  # no shared memory is left
                base.collate_fn = cls(base.collate_fn)
        return base.collate_fn if isinstance(base.collate_fn, cls) else None

    @property
    def seen(self) -> bool:
        """Whether a worker of any pass has drawn."""
        return bool(self._flag[0])

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples. In a worker."""
        batch = self._collate(samples)
        self._calls += 1
        if not self._flag[0] and (self._calls <= _ALL_OF_FIRST or not self._calls % _ONE_OF):
            after = Generators().capture()
            if self._before is not None and _differ(self._before, after):
                self._flag[0] = 1
            self._before = after
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._collate, name)


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
            batch = next(self._batches)
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
) -> Iterator[Any]:
    """Return an iterator that gives what a pass over `loader` gives after its first `batches`.

    `at_begin` and `at_last` are what `LoaderPlace` has seen, `set_saved` sets the generators to those of the save.
    `rereads`: read again what comes before, as for a stream, and show it to `seen`; else it is left out by its indices.
    Raises `StopIteration` where the data end before.
    """
    set_epoch(loader, epoch)
    generators.restore(at_begin)
    if rereads:
        whole: Iterator[Any] = iter(loader)
        for number in range(batches):
            if number == batches - 1 and at_last is not None:
                generators.restore(at_last)
            seen(next(whole))
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
        announced = _Announced.put_in(rest, steps)
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


class _Announced:
    """A batch sampler that calls something before it gives a batch of some number."""

    def __init__(self, inner: Any, steps: Mapping[int, Callable[[], object]]) -> None:
        self._inner, self._steps = inner, steps
        self.is_past = False
        """Whether the last one was called."""

    @classmethod
    def put_in(cls, rest: Any, steps: Mapping[int, Callable[[], object]]) -> _Announced | None:
        """Put it around the sampler of what `skip_first_batches` returned; None where that has none of its kind."""
        for name in ("batch_sampler", "sampler"):
            skipping: Any = getattr(rest, name, None)
            if type(skipping).__name__ == "SkipBatchSampler" and hasattr(skipping, "batch_sampler"):
                skipping.batch_sampler = announced = cls(skipping.batch_sampler, steps)
                return announced
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        last, number, batches = max(self._steps), 0, iter(self._inner)
        while True:
            # Before the sampler is asked: it may draw, too.
            if number in self._steps:
                self._steps[number]()
                self.is_past = self.is_past or number == last
            try:
                indices = next(batches)
            except StopIteration:
                return
            yield indices
            number += 1
