"""Passes over loaders with a state, in a loop of one's own: a resume goes on with the random numbers of the save.

A loader draws from the generators of the process when its iterator is made: the seed of its workers, an order. What was
restored before that is used up by it. So the iterator of a pass that goes on is made with the generators as they were
when the pass began, and they are set as they were at the save just before the first batch, and only there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resilience_sdk.checkpoint.counted_passes import CountedPasses
from resilience_sdk.checkpoint.generators import find_generators, restore_of_data, set_rng, take_rng
from resilience_sdk.checkpoint.orders import same_order
from resilience_sdk.checkpoint.pass_weights import CURE, PassWeights
from resilience_sdk.core.iterated_class import iterated_by, plain_class, set_class
from resilience_sdk.core.resume_limits import note

_END = object()


class SavedGenerators:
    """The generators of the process as of the save that was resumed; they are set once, by who is first."""

    def __init__(self, saved: Mapping[str, Any] | None, restore: Callable[[], None]) -> None:
        self._is_due = saved is not None
        self._restore = restore

    def set(self) -> None:
        """Set them, unless that was done."""
        if self._is_due:
            self._is_due = False
            self._restore()

    def leave(self) -> None:
        """Set none: somebody else does, or what has come since counts."""
        self._is_due = False


class PassWatch:
    """The passes over one loader; of the thread that trains."""

    def __init__(self, loader: Any) -> None:
        """Have the loader's iterators made here from now on; raises TypeError where its class cannot be exchanged."""
        self._loader = weakref.ref(loader)
        self._began: dict[str, Any] | None = None
        """The generators as they were when the pass began that is under way."""
        self._saved: Mapping[str, Any] | None = None
        """The pass that the next one goes on with."""
        self._generators: SavedGenerators | None = None
        self._has_epoch = False
        self._counted = CountedPasses()
        self._weights = PassWeights()
        self._old = _OldIterator(loader)
        self._plain: Any = type(loader)
        plain = self._plain
        self._kind = iterated_by(plain, lambda item: self._iterate(item, lambda: plain.__iter__(item)))
        self._is_on, self._pid = True, os.getpid()
        set_class(loader, self._kind)

    def leave(self) -> None:
        """Give the loader its own class back, if nobody has put another one on it meanwhile."""
        loader = self._loader()
        self._saved = None
        self._is_on = False  # also below a class that somebody else has put on
        if loader is not None and type(loader) is self._kind:
            set_class(loader, self._plain)

    def capture(self) -> dict[str, Any] | None:
        """Return the pass as a JSON value; None where it was not seen."""
        loader = self._loader()
        if loader is None or not issubclass(type(loader), self._kind):
            return None
        self._old.look(loader)
        from resilience_sdk.checkpoint.state import capture_generators  # imports torch

        workers = getattr(loader, "num_workers", None)
        generators = capture_generators(find_generators(loader))
        found = {"began": self._began, "generators": generators, "workers": workers, "sizes": sizes_of(loader)}
        weights = self._weights.to_json() if self._began is not None else {}
        return {**found, "weights": weights} if weights else found

    def drop_other_workers(self, saved: Mapping[str, Any] | None) -> bool:
        """Let the next pass begin anew if another number of workers saved it, which torchdata refuses; tell whether."""
        loader = self._loader()
        before, now = (saved or {}).get("workers"), getattr(loader, "num_workers", None)
        is_other = None not in (before, now) and before != now and hasattr(loader, "next_iter_state")
        if is_other:
            loader.next_iter_state = None  # type: ignore[union-attr]
        return is_other

    def resume(self, saved: Mapping[str, Any] | None, generators: SavedGenerators, *, has_epoch: bool = False) -> None:
        """Go on with a pass that was saved; None: by an older version, which does not say whether one was under way.

        `has_epoch`: the program saves the number of its epoch, so that it knows which pass this is.
        """
        self._has_epoch = has_epoch
        self._old.is_left = True
        self._saved = {"began": None, "generators": {}, "is_known": False} if saved is None else saved
        self._generators = generators

    def ended(self) -> None:
        """Note that the pass is through."""
        self._began = None

    def _iterate(self, loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        from resilience_sdk.checkpoint.state import restore_generators

        if not self._is_on or os.getpid() != self._pid:  # in a worker
            return make()
        self._counted.look(loader)
        self._old.look(loader)
        saved, self._saved = self._saved, None
        if saved is None:
            self._began = take_rng(find_generators(loader))
            self._weights.begins(loader)
            made = _Batches(make(), self.ended, None)
            self._counted.look(loader)
            return made
        if saved["began"] is None and saved.get("is_known", True):
            use_up(loader)
            restore_generators(find_generators(loader), saved["generators"])
            self._began = take_rng(find_generators(loader))
            self._weights.begins(loader)
            return _Batches(make(), self.ended, None)
        return self._go_on(loader, make, saved)

    def _go_on(self, loader: Any, make: Callable[[], Iterator[Any]], saved: Mapping[str, Any]) -> Iterator[Any]:
        now = take_rng({})
        generators = find_generators(loader)
        if saved["began"] is not None:
            set_rng(generators, saved["began"])
            note_other_sizes(sizes_of(loader), saved.get("sizes") or {})
            self._lend_weights(loader, saved)
        self._began = saved["began"] or take_rng(generators)
        self._weights.begins(loader)
        with same_order(loader):
            batches = make()
        draw_order(batches)
        self._weights.give_back()
        self._counted.look(loader)
        set_rng({}, now)  # what the iterator has drawn was drawn before the save
        restore_of_data(generators, saved["generators"])
        before_first = None if self._generators is None else self._generators.set
        return _Batches(batches, self.ended, before_first, is_rest=saved["began"] is not None and not self._has_epoch)

    def _lend_weights(self, loader: Any, saved: Mapping[str, Any]) -> None:
        """Draw the order again by the weights that it was drawn by, and say where they are not known."""
        self._weights.resume(saved.get("weights"))
        for kind in self._weights.lend(loader):
            note(
                "made anew",
                f"the order of this epoch that {kind} gives",
                "it is made of something else than when the epoch began, so that samples come twice or not at all",
                CURE,
            )


class PlainPasses(PassWatch):
    """The passes over a loader without a state: whether one is under way at a save, and no more."""

    def capture(self) -> dict[str, Any] | None:
        """Return that as a JSON value; None where it is not known."""
        loader = self._loader()
        if loader is None or not issubclass(type(loader), self._kind):
            return None
        return {"is_plain": True, "is_between": self._began is None}


def are_between(saved: Any) -> bool:
    """Tell whether a save of `PlainPasses` was made between two passes."""
    return isinstance(saved, Mapping) and saved.get("is_plain") is True and saved.get("is_between") is True


def begins_as_told(loader: Any) -> bool:
    """Tell whether a pass over a loader without a state follows from `set_epoch` and the generators of the process."""
    is_persistent = getattr(loader, "persistent_workers", False)
    return quiet_length(loader) is not None and not is_persistent and not find_generators(loader)


def has_epoch(values: Mapping[str, Any]) -> bool:
    """Tell whether plain values that are saved have the number of an epoch among them, by name."""
    return any(
        has_epoch(value) if isinstance(value, Mapping) else type(value) is int and "epoch" in str(name).lower()
        for name, value in values.items()
    )


class _OldIterator:
    """The iterator that torchdata's loader had when its passes began to be watched: a resume does not reach it."""

    def __init__(self, loader: Any) -> None:
        iterator = getattr(loader, "_iterator", None)
        self._given = getattr(iterator, "_num_yielded", None)
        self._iterator: Callable[[], Any] = lambda: None
        if isinstance(self._given, int):
            with contextlib.suppress(TypeError):
                self._iterator = weakref.ref(iterator)
        self.is_left = False
        """Whether the loader has gone to another place since."""

    def look(self, loader: Any) -> None:
        """Say it if the program goes on with that one all the same."""
        iterator = self._iterator() if self.is_left else None
        if iterator is not None and getattr(iterator, "_num_yielded", self._given) != self._given:
            self.is_left = False
            note(
                "old iterator",
                f"the place in {type(loader).__name__} for an iterator that was made before the resume",
                "it goes on from its own beginning",
                "make it behind the resume: inside of `with start_run(...)`, or after Checkpointer.resume()",
            )


class _Batches:
    """An iterator around the loader's own, which lends it all other attributes."""

    __slots__ = ("_batches", "_before", "_ended", "_is_rest")

    def __init__(
        self,
        batches: Iterator[Any],
        ended: Callable[[], None],
        before_first: Callable[[], None] | None,
        *,
        is_rest: bool = False,
    ) -> None:
        self._batches = batches
        self._before = before_first
        self._ended = ended
        self._is_rest = is_rest
        """Whether this is what was left of a pass at a save, nothing was given of it, and that is said."""

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._before is not None:
            before, self._before = self._before, None
            before()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended()
            if self._is_rest:
                note_empty_pass()
            raise
        self._is_rest = False
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def note_empty_pass() -> None:
    """Say that the first pass behind a resume gave nothing, which those must know who count epochs by their steps."""
    note(
        "empty pass",
        "an epoch number that is taken from step // len(loader)",
        "the checkpoint was made behind the last batch of a pass, so the first pass over the loader is the end of that "
        "one and gives no batch, and such a loop trains one epoch too few",
        "take it from a value that is saved (Checkpointer.values['epoch']), or count no pass that gives no batch",
    )


def is_loader(item: Any) -> bool:
    """Tell whether a loop makes passes over an object of the state: not over what a loader iterates."""
    from torch.utils.data import Dataset, Sampler

    is_iterated = hasattr(type(item), "__iter__") and not hasattr(type(item), "__next__")
    return is_iterated and not isinstance(item, (Dataset, Sampler))


def quiet_length(loader: Any) -> int | None:
    """Return the batches of an epoch where it is known that no random number is drawn at its end, else None.

    That is so for torch's own loader and usual samplers. With a generator of its own, a RandomSampler draws
    one more permutation when it is exhausted; others may do what they like.
    """
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
        SequentialSampler,
    )

    if plain_class(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    is_known = type(loader.sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    if not is_known or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return None
    return len(loader)


def sizes_of(loader: Any) -> dict[str, int]:
    """Return how many samples a batch and the data have, of a loader that tells."""
    found = {"batch": getattr(loader, "batch_size", None)}
    with contextlib.suppress(Exception):  # no such loader, a stream, or what cannot tell
        found["samples"] = len(loader.dataset)
    return {name: size for name, size in found.items() if isinstance(size, int) and not isinstance(size, bool)}


def note_other_sizes(
    now: Mapping[str, int], saved: Mapping[str, Any], epoch: str = "this epoch", *, skips: bool = True
) -> None:
    """Say what a resume within an epoch makes of batches and data that are others now, as `sizes_of` tells both.

    `skips`: the place is a number of batches, whatever they hold.
    """
    batch, before = now.get("batch"), saved.get("batch")
    if batch and before and batch != before:
        note(
            "other batch",
            f"the steps of a batch of {before} samples with one of {batch}",
            f"steps, random numbers and schedules by the step are others, and some samples of {epoch} may come twice"
            + " or never" * skips,
            f"resume with batch_size={before} for the same steps",
        )
    length, before = now.get("samples"), saved.get("samples")
    if length and before and length != before:
        note(
            "other length",
            f"the order of {epoch}",
            f"the data set has {length} samples now, {before} before, so that some samples of it come twice or never",
            "resume with the data that it had",
        )


def unused_state(loader: Any) -> Any:
    """Return the state of torchdata's loader where it has no iterator; else None.

    Asked for its state it would make one, for which it draws: a save must not change what comes after it.
    """
    is_asked = hasattr(loader, "_initial_iter_for_state_dict") and hasattr(loader, "next_iter_state")
    if not is_asked or loader._iterator is not None:
        return None
    return loader.next_iter_state or {}


def use_up(loader: Any) -> None:
    """Let torchdata's loader take what it was given of a pass that is through, before it makes the next iterator.

    It would make two, and draw for both, where it draws once in a training that was not interrupted.
    """
    state, make = getattr(loader, "next_iter_state", None), getattr(loader, "_get_iterator", None)
    if make is None or not isinstance(state, Mapping) or not state.get("_iterator_finished"):
        return
    now = take_rng({})
    made = make()
    if loader.persistent_workers and loader.num_workers:
        loader._iterator = made
    set_rng({}, now)


def draw_order(batches: Any, prepare: Callable[[], None] | None = None) -> None:
    """Have the order of a pass drawn that its iterator would draw with the first batch, after `prepare()`."""
    while (inner := getattr(batches, "_batches", None)) is not None:  # who times them, or counts
        batches = inner
    lazy = getattr(batches, "_sampler_iter", None)
    if type(lazy) is itertools.islice:  # torchdata's way back for a sampler without a state
        if prepare is not None:
            prepare()
        first = next(lazy, _END)
        batches._sampler_iter = lazy if first is _END else itertools.chain([first], lazy)
