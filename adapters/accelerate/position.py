"""The place of a training with Accelerate in its data, and the way of a new process back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from resilience_sdk.adapters._base import framework
from resilience_sdk.adapters._draws import Announced
from resilience_sdk.adapters._proof import inner_loader, printing
from resilience_sdk.adapters.accelerate.reads import Reads
from resilience_sdk.checkpoint.counted_passes import CountedPasses
from resilience_sdk.checkpoint.generators import find_generators, set_rng, take_rng
from resilience_sdk.checkpoint.passes import note_empty_pass
from resilience_sdk.core.console import say
from resilience_sdk.core.resume_limits import note
from resilience_sdk.rank.pass_print import PassPrint

_END = object()


class Position:
    """The position of a training in its data, in samples, so that another number of ranks finds the place too.

    Counts the passes over one prepared loader and the samples in them; of the thread that trains.

    The first pass after a resume is the rest of the epoch that was interrupted. What was read of it is left out by the
    indices of its samples, and not read again. That is so for a loader that remembers its place, too
    (`use_stateful_dataloader`): Accelerate has read a batch ahead of it, and its order would be that of another epoch.
    What is streamed has no indices: there such a loader goes back by itself.
    """

    def __init__(
        self,
        loader: Any,
        ranks: int,
        restored: Callable[[], object] = object,
        *,
        is_speaker: bool = True,
        is_watched: bool = True,
    ) -> None:
        """`restored()` is called where all generators of this process were set as they were at the save.

        `is_watched`: what reading draws is looked at.
        """
        self.restored = restored
        self._is_speaker = is_speaker
        self.is_asked = False
        """Whether the program has asked for the epoch, and so knows which one is under way."""
        self.epoch = 0
        self.samples = 0
        """Of this epoch, of all ranks together."""
        self.total = 0
        """Samples of all epochs and all ranks together."""
        self._loader = loader
        self._per_batch = samples_per_batch(loader, ranks)
        self._per_epoch = samples_per_epoch(loader)
        self._ranks = ranks
        self._iteration = 0
        self._rng: Any = None
        self._is_resumed = self._is_over = False
        self._is_ahead = False
        self._reads = Reads(loader if is_watched else None)
        self._counted = CountedPasses()
        self._rng_of_save: Any = None
        self._saved_ranks = ranks
        self.prints = PassPrint()
        """The fingerprint of this pass."""
        self.told: Callable[[int, int, Any], None] | None = None
        """Takes each batch, with the pass and its number in that."""

    @property
    def loader(self) -> Any:
        """The loader of the training."""
        return self._loader

    def leave(self) -> None:
        """Leave the loader as it was."""
        self._reads.leave()

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
            "is_ahead": self._is_ahead,
            "per_batch": self._per_batch,
            "per_epoch": self._per_epoch,
        }

    def own_state(self) -> dict[str, Any]:
        """Return what is this rank's alone as a JSON value: the generators that it reads its data with, its samples."""
        printed = self.prints.to_json(self._done())
        return {"ranks": self._ranks, "rng": self._rng, "reads": self._reads.state(), "print": printed}

    def resume(self, saved: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Take a saved one, and what `own_state` gave, now that the generators are as they were at the save."""
        from resilience_sdk.checkpoint.state import capture_rng  # imports torch

        self.epoch, self.samples, self.total = (int(saved[name]) for name in ("epoch", "samples", "total"))
        self._iteration = int(saved["iteration"])
        self._is_over = bool(saved["is_over"])
        self._rng = saved["rng"]
        self._is_resumed = True
        self._rng_of_save = capture_rng()
        self._saved_ranks = int(saved.get("ranks", self._ranks))
        # One that was saved by an older version does not say so: the first pass alone is made ahead.
        self._is_ahead = bool(saved.get("is_ahead", not self._iteration))
        if self._counts_by_itself:
            _forget_place(self._loader)  # which Accelerate has loaded: ours counts
        printed = None
        if own is not None and int(own["ranks"]) == self._ranks:
            self._rng = own["rng"]
            self._reads.resume(own["reads"])
            printed = own.get("print") if saved.get("per_batch") == self._per_batch else None
        self.prints.resume(printed, self._done())
        self._note_limits(saved)

    @property
    def _is_stateful(self) -> bool:
        return bool(getattr(self._loader, "use_stateful_dataloader", False))

    @property
    def _counts_by_itself(self) -> bool:
        """Whether the place of a loader that remembers one is found by the indices of its samples all the same."""
        from torch.utils.data import IterableDataset

        return self._is_stateful and not isinstance(getattr(self._loader, "dataset", None), IterableDataset)

    def _note_limits(self, saved: Mapping[str, Any]) -> None:
        per_batch, per_epoch = saved.get("per_batch"), saved.get("per_epoch")
        if self._saved_ranks != self._ranks or per_batch not in (None, self._per_batch):
            before = "" if per_batch is None else f", {per_batch} before"
            note(
                "accelerate batch",
                f"the steps of {_words(self._saved_ranks, self._ranks, per_batch, self._per_batch)}",
                f"a batch of all ranks has {self._per_batch} samples now{before}, so that the training has other "
                "steps, random numbers and, where a schedule counts steps, other learning rates for each sample",
                "resume with as many ranks and samples in a batch for the same steps, or scale max_steps and the "
                "schedule yourself",
            )
        if per_epoch is not None and self._per_epoch is not None and per_epoch != self._per_epoch:
            note(
                "accelerate length",
                f"the order of epoch {self.epoch}",
                f"the data set has {self._per_epoch} samples now, {per_epoch} before, so that some samples of this "
                "epoch are used twice or never",
                "resume with the data that it had",
            )
        workers = int(getattr(self._loader, "num_workers", 0) or 0)
        if self._counts_by_itself and self._is_ahead and workers and self.samples:
            note(
                "accelerate workers",
                "what the loader's workers draw at random in the rest of its first epoch",
                "Accelerate started them before the resume",
                "leave use_stateful_dataloader out: the place is found without it",
            )

    # -- passes

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of one pass and count them; of the first one after a resume what is left."""
        self._look_at_samplers()
        if self._is_resumed:
            self._is_resumed = False
            batches = self._rest(batches)
        else:
            if self.samples:  # the last pass was left by a break
                self.epoch, self.samples = self.epoch + 1, 0
            self._iteration = int(getattr(self._loader, "iteration", 0))
            self._rng = take_rng(self._generators())
            self._is_ahead = self._is_made_ahead(self._loader)
            self._reads.begins()
            if self._is_ahead:
                self._rng["generators"].update(drawn_ahead(self._loader, self._generators()))
            if self.prints.is_checked:
                batches = self._printed(batches)
        per_batch, per_epoch = self._per_batch, self._per_epoch
        for batch in self._reads.followed(batches):
            read = per_batch
            if per_epoch is not None and 0 < per_epoch - self.samples < per_batch:
                read = per_epoch - self.samples  # the last one is filled up with others, or is short
            if self.told is not None:
                self.prints.note(batch)
                self.told(self.epoch, self.samples // per_batch, batch)
            self.samples += read
            self.total += read
            yield batch
        self.epoch, self.samples, self._rng = self.epoch + 1, 0, None
        self._iteration = int(getattr(self._loader, "iteration", self._iteration + 1))

    def _look_at_samplers(self) -> None:
        self._counted.look(self._loader, sampler_of(self._loader))

    def _printed(self, batches: Iterator[Any]) -> Iterator[Any]:
        with printing(self.prints, self._loader):
            first = next(batches, _END)
        if first is not _END:
            yield first
            yield from batches

    def _done(self) -> int:
        """Return how many batches of this epoch, as they are now, have been read as a whole."""
        is_last = self._per_epoch is not None and self.samples >= self._per_epoch
        return -(-self.samples // self._per_batch) if is_last else self.samples // self._per_batch

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        loader = self._loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._iteration)  # which Accelerate does not save
        if self._is_stateful and not self._counts_by_itself:
            if self._is_over:  # it would begin anew
                loader.iteration = self._iteration + 1
                return
            yield from batches
            return
        done, rest, ahead, reads = self._done(), batches, None, self._reads
        reads.goes_on(done)
        if done and not self._is_ahead and reads.are_made_again(done):
            yield from self._read_again(batches, done)
            loader.iteration = self._iteration + 1
            return
        announced = None
        if done:
            ahead = framework("accelerate", "accelerate").skip_first_batches(loader, done)
            if reads.has_last(done):
                announced = Announced.put_in(ahead, {done: reads.set_last, done + 1: self._set_saved})
            rest = iter(ahead)
        # The order of an epoch is drawn when its first batch is asked for, as of then; what comes later is drawn as of
        # the save.
        with self._drawing_as_saved(), printing(self.prints, loader, ahead):
            generators = self._generators()
            if self._rng is None:
                self._rng = take_rng(generators)
            elif done and self._is_ahead:
                # Which drew the seed of its workers when it was made, before the pass began.
                skipping: Any = getattr(ahead, "batch_sampler", None)
                skipping.batch_sampler = _DrawnAsOf(skipping.batch_sampler, lambda: set_rng(generators, self._rng))
            else:
                set_rng(generators, self._rng)
            first = next(rest, _END)
        self._look_at_samplers()
        if done and self.prints.is_known:
            self.prints.leave_out(done)
            self.prints.compare(self.epoch, inner_loader(loader))
        if done and not (announced is not None and announced.is_past):
            self._set_saved()
        if first is not _END:
            yield first
            yield from rest
        elif done and not self.is_asked:
            note_empty_pass()
        if done:
            loader.iteration = self._iteration + 1

    def _set_saved(self) -> None:
        """Set the generators of the process, of the data and of what else holds some as they were at the save."""
        from resilience_sdk.checkpoint.state import restore_rng

        restore_rng(self._rng_of_save)
        self._reads.set_saved()
        self.restored()

    def _read_again(self, batches: Iterator[Any], done: int) -> Iterator[Any]:
        """Read all of the epoch again: other processes have drawn, or nobody knows when."""
        if self._is_speaker:
            say(f"reading the first {done} batches of epoch {self.epoch} again: reading them draws random numbers")
        set_rng(self._generators(), self._rng)
        self._reads.set_begin()
        for number in range(done):
            with nullcontext() if number else printing(self.prints, self._loader):
                batch = next(batches, _END)
            if batch is _END:
                break
        if self.prints.is_known:
            self.prints.leave_out(done)
        self._set_saved()
        yield from batches

    @staticmethod
    def _is_made_ahead(loader: Any) -> bool:
        """Tell whether the iterator of the next pass is there: Accelerate asks a new loader for its state."""
        base = getattr(loader, "base_dataloader", None)
        return bool(getattr(base, "_initial_iter_for_state_dict", False))

    @contextmanager
    def _drawing_as_saved(self) -> Iterator[None]:
        """Let the order be drawn from what as many ranks as saved it draw it from.

        With several ranks Accelerate gives the sampler a generator, which one rank alone does without.
        """
        from torch.utils.data import RandomSampler

        from resilience_sdk.checkpoint.state import restore_generators

        sampler = sampler_of(self._loader)
        if self._rng is None or self._saved_ranks == self._ranks or not isinstance(sampler, RandomSampler):
            yield
            return
        import torch

        own, saved = sampler.generator, self._rng["generators"]
        name = next((name for name in ("synchronized", "inner_sampler", "sampler") if name in saved), None)
        sampler.generator = None if name is None else torch.Generator()
        if name is not None:
            restore_generators({name: sampler.generator}, saved)
        try:
            yield
        finally:
            sampler.generator = own  # the iterator has its own reference

    def _generators(self) -> dict[str, Any]:
        return generators_of(self._loader)


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the generators that a prepared loader draws from."""
    found = find_generators(loader)
    found.pop("loader.synchronized_generator", None)  # under its own name, as older versions have it
    shared = getattr(loader, "synchronized_generator", None)
    if shared is not None and all(shared is not other for other in found.values()):
        found["synchronized"] = shared
    return found


def other_state(loader: Any) -> dict[str, Any]:
    """Return where a prepared loader is whose passes nobody counts, such as that of evaluations, as a JSON value."""
    from resilience_sdk.checkpoint.state import capture_generators

    found = capture_generators(generators_of(loader))
    return {"iteration": int(getattr(loader, "iteration", 0)), "generators": found}


def set_other(loader: Any, saved: Mapping[str, Any]) -> None:
    """Let its next pass have the order that it would have had: Accelerate saves neither number nor generators."""
    from resilience_sdk.checkpoint.state import restore_generators

    if hasattr(loader, "iteration"):
        loader.iteration = int(saved["iteration"])
    restore_generators(generators_of(loader), saved["generators"])


def samples_per_batch(loader: Any, ranks: int) -> int:
    """Return how many samples all ranks together take with one batch each."""
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):  # of an iterable data set there is no sampler that would know
        return int(getattr(loader, "batch_size", None) or 1) * ranks


def _words(saved_ranks: int, ranks: int, saved_batch: Any, batch: int) -> str:
    if saved_ranks == ranks:
        return f"a batch of {saved_batch} samples with one of {batch}"
    return " with ".join("1 rank" if number == 1 else f"{number} ranks" for number in (saved_ranks, ranks))


class _DrawnAsOf:
    """Batches of indices that are drawn with generators which are set just before."""

    def __init__(self, batches: Any, set_generators: Callable[[], None]) -> None:
        self._batches = batches
        self._set_generators = set_generators

    def __iter__(self) -> Iterator[Any]:
        self._set_generators()
        yield from self._batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _forget_place(loader: Any) -> None:
    """Let the next pass over a loader that remembers its place begin at the beginning, with an iterator of its own."""
    base = loader.base_dataloader
    base.load_state_dict({})
    base.next_iter_state = None  # of a state that was loaded and not used yet


def sampler_of(loader: Any) -> Any:
    """Return what the order of all ranks' samples is drawn by; None where there is none."""
    batches = getattr(loader, "batch_sampler", None)
    while (inner := getattr(batches, "batch_sampler", None)) is not None:  # a rank's share of all batches
        batches = inner
    return getattr(batches, "sampler", None)


def samples_per_epoch(loader: Any) -> int | None:
    """Return how many samples one pass has, over all ranks; None where that cannot be told before it ends."""
    try:
        return len(sampler_of(loader))
    except (TypeError, NotImplementedError):
        return None


def drawn_ahead(loader: Any, generators: Mapping[str, Any]) -> dict[str, str]:
    """Return how generators were before the iterator that was made ahead drew its order from them, by their names.

    Those of torchdata's own samplers, which draw when an iterator is made and keep what they have begun with.
    """
    from resilience_sdk.checkpoint.state import encode_tensor

    batches = getattr(getattr(loader.base_dataloader, "_iterator", None), "_sampler_iter", None)
    order = getattr(batches, "sampler_iter", None)
    own = getattr(getattr(order, "sampler", None), "generator", None)
    state = getattr(order, "generator_state", None)
    if own is None or state is None:
        return {}
    return {name: encode_tensor(state) for name, generator in generators.items() if generator is own}
