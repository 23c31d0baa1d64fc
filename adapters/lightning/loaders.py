"""The place of a rank in the training data of a fit, and the way of a new process back to it.

Lightning counts batches and makes the iterator of a resumed epoch before the sampler knows the epoch, before generators
are what they were, and ahead by one batch where a loader has no length. So each loader is taken where the strategy
processes it and gets a subclass of its own class, which remembers how each pass over it began. A resume makes the
iterator when all of that is back: with the order of that epoch, behind the batches that training was given.

A loader with `state_dict` goes back by itself; one without is read again up to the place.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from resilience_sdk.adapters._base import Patches
from resilience_sdk.checkpoint.counted_passes import CountedPasses
from resilience_sdk.checkpoint.generators import capture_one, find_generators, restore_one
from resilience_sdk.checkpoint.orders import same_order
from resilience_sdk.checkpoint.passes import draw_order, note_other_sizes, sizes_of
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.iterated_class import iterated_by, set_class
from resilience_sdk.core.resume_limits import note
from resilience_sdk.rank.data import END, has_state, next_batch
from resilience_sdk.rank.pass_print import PassPrint

Generators = Mapping[str, Any]


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the generators that a loader draws its order from, also inside of what Lightning puts around a sampler."""
    found = find_generators(loader)
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    generator = getattr(inner, "generator", None)
    if generator is not None and all(generator is not other for other in found.values()):
        found["wrapped_sampler"] = generator
    return found


class Draws:
    """The states of the generators of this process and of a loader, at one moment. Cheap to take."""

    __slots__ = ("numpy", "own", "python", "torch")

    def __init__(self, generators: Generators) -> None:
        """Take them."""
        import torch

        self.python = random.getstate()
        self.torch = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else numpy.random.get_state(legacy=True)
        self.own = own_states(generators)

    def saved(self) -> dict[str, Any]:
        """Return them as a checkpoint holds them."""
        import torch

        version, words, gauss = self.python
        saved: dict[str, Any] = {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "torch": self.torch,
            "own": self.own,
        }
        if self.numpy is not None:
            name, keys, position, has_gauss, cached = self.numpy
            words = torch.from_numpy(keys.astype("int64"))
            saved["numpy"] = [name, words, int(position), int(has_gauss), float(cached)]
        return saved


def set_draws(generators: Generators, saved: Mapping[str, Any] | None) -> None:
    """Set the generators as they were then; None: leave them."""
    import torch

    if saved is None:
        return
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved:
        import numpy

        name, keys, position, has_gauss, cached = saved["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    set_own(generators, saved["own"])


def own_states(generators: Generators) -> dict[str, Any]:
    """Return the states of generators of a loader: of torch, of Python or of numpy."""
    import torch

    return {
        name: one.get_state() if isinstance(one, torch.Generator) else capture_one(one)
        for name, one in generators.items()
    }


def set_own(generators: Generators, states: Mapping[str, Any]) -> None:
    """Set generators of a loader as they were then, as far as they are the same ones, and of the same kind."""
    import torch

    for name, generator in generators.items():
        state = states.get(name)
        if isinstance(generator, torch.Generator):
            if isinstance(state, torch.Tensor):
                generator.set_state(state)
        elif isinstance(state, Mapping):
            restore_one(generator, state)


def say_limits(loader: Any) -> None:
    """Say what of a loader's data a resume will not repeat, as far as that can be seen."""
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return
    kind = type(loader).__name__
    if not getattr(loader, "in_order", True):
        note(
            "order of workers",
            f"the order in which the workers of {kind}(in_order=False) give their batches",
            "samples of this epoch may come twice or not at all",
            "use in_order=True",
        )
    why, cure = "", "draw from a generator that is seeded by epoch and index"
    if not isinstance(loader.dataset, IterableDataset) and has_state(loader):
        why, cure = kind, f"{cure}, or use torch's DataLoader, which is read again"
    elif loader.persistent_workers:
        why, cure = f"{kind}(persistent_workers=True)", f"{cure}, or use persistent_workers=False"
    if why:
        note(
            "augmentation in workers",
            f"random numbers that the workers of {why} draw",
            "the samples are the same, but a random augmentation makes other pictures of them (where nothing is drawn "
            "in __getitem__ the resume is exact)",
            cure,
        )


class LoaderWatch:
    """One loader of the training, and the pass over it. Of the thread that trains."""

    def __init__(
        self,
        loader: Any,
        looks_ahead: Callable[[], bool],
        *,
        epoch: Callable[[], int] = int,
        is_speaker: bool = True,
    ) -> None:
        """Put the subclass on `loader`; raises TypeError where its class cannot be exchanged.

        `looks_ahead()`: whether a batch is fetched before the one before it is trained on.
        """
        self.epoch = epoch
        self._plain: Any = type(loader)
        self.loader = loader
        set_class(loader, iterated_by(self._plain, self._iterated()))
        self.generators = generators_of(loader)
        self.has_state = has_state(loader)
        self.has_workers = getattr(loader, "num_workers", 0) > 0
        self.is_held = False
        """Iterators are empty: what Lightning makes before all is back is not looked at."""
        self.place: Mapping[str, Any] | None = None
        """Where the next iterator is to begin."""
        self.looks_ahead = looks_ahead
        self.is_speaker = is_speaker
        self._pass: _Pass | None = None
        self.prints = PassPrint()
        """The fingerprint of the pass, if it is that of the training."""
        self.counted = CountedPasses()

    def restore(self) -> None:
        """Give the loader its own class back; iterators that exist go on."""
        set_class(self.loader, self._plain)

    def _iterated(self) -> Callable[[Any], Iterator[Any]]:
        # A function: a bound method would not be given the loader. One that was made like this one iterates itself.
        return lambda loader: self._iterate() if loader is self.loader else self._plain.__iter__(loader)

    def _iterate(self) -> Iterator[Any]:
        if self.is_held:
            return iter(())
        place, self.place = self.place, None
        self._pass = _Pass(self, place)
        return self._pass

    def capture(self, ahead: int) -> dict[str, Any]:
        """Return the place in this pass, without the batches that are fetched `ahead` of the training."""
        now = self._pass
        place: dict[str, Any] = {"own": own_states(self.generators)}
        if now is not None:
            place |= now.capture(ahead)
        elif self.has_state:
            place["state"] = self.loader.state_dict()
        return place

    def state_now(self) -> Any:
        """Return a copy of the loader's state; None where it has none, or cannot tell it, which is said."""
        if not self.has_state:
            return None
        try:
            return copy.deepcopy(self.loader.state_dict())  # a dataset may hand out its live state
        except Exception as error:  # noqa: BLE001 - no save was asked for, so the training goes on
            note(
                "loader state",
                f"the batch that Lightning fetches ahead from {type(self.loader).__name__}",
                f"its state_dict() fails between two batches ({type(error).__name__}: {error}), so a batch is left out",
                "let it be called at any time",
            )
            return None

    def make(self) -> Iterator[Any]:
        """Return a new iterator of the loader's own."""
        self.counted.look(self.loader)
        return self.prints.make(self.loader, lambda: self._plain.__iter__(self.loader))


class _Pass:
    """One iterator of a loader, which lends it all other attributes."""

    def __init__(self, watch: LoaderWatch, place: Mapping[str, Any] | None) -> None:
        self._watch = watch
        self._at_first: Any = None
        self._before: tuple[Draws | None, Any] | None = None
        """How the generators were before the newest batch was fetched, and the loader's state."""
        self._is_ahead: bool | None = None
        self._yielded = 0
        if place is None:
            self._at_iter: Any = Draws(watch.generators)
            self._batches = watch.make()
        else:
            self._at_iter, self._at_first = place.get("at_iter"), place.get("at_first")
            self._batches = self._go_back(place)

    def _go_back(self, place: Mapping[str, Any]) -> Iterator[Any]:
        """Return the iterator behind the batches that were trained on, with the generators that it needs next."""
        watch, count = self._watch, int(place.get("yielded", 0))
        set_draws(watch.generators, self._at_iter)
        if count:
            note_other_sizes(sizes_of(watch.loader), place.get("sizes") or {})
        watch.prints.resume(place.get("print"), count)
        if watch.has_state and "state" in place:
            watch.loader.load_state_dict(place["state"])
            with same_order(watch.loader):
                batches = watch.make()
            draw_order(batches, lambda: set_draws(watch.generators, self._at_first))
        else:
            batches = watch.make()
            set_draws(watch.generators, self._at_first)
            if count and watch.is_speaker and not isinstance(watch.loader, Sequence):
                say_once(
                    "fast-forward",
                    f"the data loader has no state_dict(): its first {count} batches of this epoch are read again, to "
                    "go on behind them; torchdata's StatefulDataLoader (pip install 'resilience-sdk[data]') remembers "
                    "its place",
                )
            for done in range(count):
                batch = next_batch(batches)
                if batch is END:
                    say(f"this epoch has only {done} batches now, {count} were done: it is over")
                    break
                watch.prints.note(batch)
            if count:
                watch.prints.compare(watch.epoch(), watch.loader)
        watch.prints.forget_saved()
        watch.counted.look(watch.loader)
        self._yielded = count
        set_draws(watch.generators, place.get("before"))
        return batches

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        watch = self._watch
        if self._is_ahead is None:
            self._is_ahead = watch.looks_ahead()
        if not self._yielded and self._at_first is None:
            self._at_first = Draws(watch.generators)
        if self._is_ahead:
            self._before = None if watch.has_workers else Draws(watch.generators), watch.state_now()
        batch = next(self._batches)
        self._yielded += 1
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # it is not made yet
            raise AttributeError(name)
        return getattr(self._batches, name)

    def capture(self, ahead: int) -> dict[str, Any]:
        """Return the place, see `LoaderWatch.capture`."""
        place: dict[str, Any] = {"yielded": self._yielded - ahead, "sizes": sizes_of(self._watch.loader)}
        if found := self._watch.prints.to_json(self._yielded - ahead):
            place["print"] = found
        for name, draws in (("at_iter", self._at_iter), ("at_first", self._at_first)):
            if draws is not None:
                place[name] = draws.saved() if isinstance(draws, Draws) else draws
        draws, state = self._before if ahead and self._before is not None else (None, None)
        if draws is not None:
            place["before"] = draws.saved()
        if self._watch.has_state:
            place["state"] = self._watch.loader.state_dict() if state is None else state
        return place


class TrainingData(Patches):
    """The loaders of the training of one fit, in order; of the thread that trains, on each rank."""

    def __init__(self, trainer: Any) -> None:
        """Take each loader from now on, where the strategy processes it."""
        super().__init__()
        self._trainer = trainer
        self._watches: list[LoaderWatch] = []
        self._others: list[Generators] = []
        """Of loaders of evaluations."""
        self._is_training = False
        self._processed_now = 0
        self.prints = PassPrint()
        """The fingerprint of the pass over the one loader of the training."""
        self._saved: Mapping[str, Any] | None = None
        self._setup_data = trainer.fit_loop.setup_data
        self._process = trainer.strategy.process_dataloader
        self._reloads: dict[str, float] = {}
        """In which epochs the loaders were read that a checkpoint was saved with, until they are read here."""
        self._set_up_evaluation = trainer.fit_loop.epoch_loop.val_loop.setup_data
        self.replace(trainer.fit_loop, "setup_data", self._set_up)
        self.replace(trainer.fit_loop.epoch_loop.val_loop, "setup_data", self._evaluation_set_up)
        self.replace(trainer.strategy, "process_dataloader", self._processed)
        self.on_detach(self._restore)

    def _restore(self) -> None:
        for watch in self._watches:
            watch.restore()
        self._watches = []

    # -- taking

    def _set_up(self) -> None:
        self._is_training, self._processed_now = True, 0
        try:
            self._setup_data()
        finally:
            self._is_training = False
        self._keep_reload("train")
        if type(self._fetcher()).__name__ == "_DataLoaderIterDataFetcher":
            note(
                "dataloader_iter",
                "the batches that training_step(dataloader_iter) has fetched ahead",
                "they are not trained on (where it takes one batch in each step the resume is exact)",
                "let training_step take the batch",
            )

    def _evaluation_set_up(self) -> None:
        self._set_up_evaluation()
        self._keep_reload("val")

    def _reload_places(self) -> dict[str, tuple[Any, str]]:
        """Return where Lightning keeps in which epoch it has read loaders, which it may read again every few epochs."""
        fit_loop = self._trainer.fit_loop
        places = {
            "train": (fit_loop, "_last_train_dl_reload_epoch"),
            "val": (fit_loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch"),
        }
        every = self._trainer.reload_dataloaders_every_n_epochs
        return {name: place for name, place in places.items() if every and hasattr(*place)}

    def _keep_reload(self, name: str) -> None:
        """Let loaders be read again in the epoch in which they would have been without the resume."""
        place, last = self._reload_places().get(name), self._reloads.pop(name, None)
        trainer = self._trainer
        if place is None or last is None:
            return
        if 0 <= trainer.current_epoch - last < trainer.reload_dataloaders_every_n_epochs:
            setattr(*place, last)

    def _processed(self, loader: Any) -> Any:
        loader = self._process(loader)
        if not self._is_training:
            self._others.append(generators_of(loader))
            return loader
        for watch in [watch for watch in self._watches if watch.loader is loader]:
            watch.restore()
            self._watches.remove(watch)
        if hasattr(type(loader), "__next__"):
            note(
                "iterator",
                "the place in an iterator that was given to fit() as a loader",
                "a resumed fit begins with what it gives first",
                "give fit() what each epoch iterates anew, such as a DataLoader",
            )
            return loader
        is_first = bool(self._trainer.is_global_zero)
        try:
            watch = LoaderWatch(loader, self._looks_ahead, epoch=self._epoch, is_speaker=is_first)
        except TypeError:
            loader = _Iterable(loader)
            watch = LoaderWatch(loader, self._looks_ahead, epoch=self._epoch, is_speaker=is_first)
        watch.is_held = self._saved is not None
        self._watches.append(watch)
        for one in self._watches:  # of several nobody knows which batch is whose
            one.prints = self.prints if one is watch and not self._processed_now else PassPrint()
        self._processed_now += 1
        say_limits(loader)
        return loader

    def _epoch(self) -> int:
        return int(self._trainer.current_epoch)

    def _current(self) -> list[LoaderWatch]:
        """Return the watches of the loaders that Lightning uses now, in its order."""
        combined = getattr(self._trainer.fit_loop, "_combined_loader", None)
        flattened = list(getattr(combined, "flattened", ()))
        return [watch for loader in flattened for watch in self._watches if watch.loader is loader]

    def _fetcher(self) -> Any:
        return getattr(self._trainer.fit_loop, "_data_fetcher", None)

    def _looks_ahead(self) -> bool:
        fetcher = self._fetcher()
        return hasattr(fetcher, "batches") and getattr(fetcher, "length", 0) is None

    # -- what a checkpoint holds of it

    def capture(self) -> dict[str, Any]:
        """Return where this rank is, as of now: between two steps or two epochs."""
        ahead = len(getattr(self._fetcher(), "batches", ()))
        iterator = getattr(getattr(self._trainer.fit_loop, "_combined_loader", None), "_iterator", None)
        return {
            "loaders": [watch.capture(ahead) for watch in self._current()],
            "consumed": list(getattr(iterator, "_consumed", ())),
            "others": [own_states(own) for own in self._others],
            "reloads": {name: getattr(*place) for name, place in self._reload_places().items()},
        }

    def hold(self, saved: Mapping[str, Any]) -> None:
        """Keep a saved place until `go_on` or `begin_epoch`."""
        self._saved = saved
        self._reloads = dict(saved.get("reloads", {}))

    def _release(self) -> Mapping[str, Any]:
        saved, self._saved = self._saved or {}, None
        for watch in self._watches:
            watch.is_held = False
        return saved

    def _places(self, saved: Mapping[str, Any], batches: int) -> list[Mapping[str, Any]]:
        """Return the saved places, also those of earlier versions, which have no more than states of loaders."""
        if "earlier" not in saved:
            return list(saved.get("loaders", ()))
        states = iter(saved["earlier"])
        found: list[Mapping[str, Any]] = []
        for watch in self._current():
            state = next(states, None) if watch.has_state else None
            found.append({} if state is None else {"state": state, "yielded": batches})
        return found

    def go_on(self, fetcher: Any, batches: int) -> None:
        """Let the fetcher go on behind the so many batches of this epoch that were trained on."""
        saved = self._release()
        places, watches = self._places(saved, batches), self._current()
        if len(places) != len(watches):
            self._say_other(len(places), len(watches))
            places = []
        for watch, place in zip(watches, places, strict=False):
            watch.place = place
        iter(fetcher)
        fetcher.fetched += batches
        iterator: Any = getattr(getattr(self._trainer.fit_loop, "_combined_loader", None), "_iterator", None)
        if hasattr(iterator, "_idx"):
            iterator._idx += batches
        consumed = list(saved.get("consumed", ()))
        if len(consumed) == len(getattr(iterator, "_consumed", ())):
            iterator._consumed = consumed
        self._set_own(saved)

    def skip_epoch(self) -> None:
        """Read nothing: all batches of this epoch were trained on."""
        self._set_own(self._release())

    def before_epoch(self) -> None:
        """Set the generators of the loaders as they were where an epoch had ended, before the next one begins."""
        self._set_own(self._saved or {})

    def begin_epoch(self, fetcher: Any) -> None:
        """Let the fetcher begin an epoch, where the one before was complete at the save."""
        saved = self._release()
        for watch, place in zip(self._current(), self._places(saved, 0), strict=False):
            _end_pass(watch, place, is_all="earlier" in saved)
        iter(fetcher)

    def _set_own(self, saved: Mapping[str, Any]) -> None:
        for watch, place in zip(self._current(), saved.get("loaders", ()), strict=False):
            set_own(watch.generators, place.get("own", {}))
        for own, states in zip(self._others, saved.get("others", ()), strict=False):
            set_own(own, states)

    def _say_other(self, saved: int, here: int) -> None:
        say_once(
            "other loaders",
            f"the checkpoint has places in {saved} loaders of the training, this one has {here}: the epoch begins with "
            "their first samples; resume with the loaders of the program that wrote it",
        )


_FINISHED = "_iterator_finished"
"""How the state of a `StatefulDataLoader` says that the pass is over."""


def _end_pass(watch: LoaderWatch, place: Mapping[str, Any], *, is_all: bool) -> None:
    """Let a stream that knows its place come to the end of the pass that was complete; draws nothing that counts.

    Others begin a pass by their generators alone. `is_all`: these were not saved, so let them, too.
    """
    from torch.utils.data import IterableDataset

    dataset = getattr(watch.loader, "dataset", None)
    is_stream = dataset is None or isinstance(dataset, IterableDataset)
    if not (watch.has_state and "state" in place and (is_stream or is_all)):
        return
    state = place["state"]
    if isinstance(state, Mapping) and _FINISHED in state:
        # Where a fetcher counts to a length, or to a limit, it does not ask for the end: the next pass begins all the
        # same.
        state = {**state, _FINISHED: True}
    now = Draws(watch.generators)
    watch.loader.load_state_dict(state)
    watch.make()  # the dataset takes its state with the first iterator, and the next one draws as it ever does
    set_draws(watch.generators, now.saved())


class _Iterable:
    """Around what can have no subclass, such as a list of batches: iterated in its place."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)
