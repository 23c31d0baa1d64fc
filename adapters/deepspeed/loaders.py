"""DeepSpeed's own loaders: that of `training_data=`, which is its own iterator, and `RepeatingLoader`.

`RepeatingLoader(loader)` begins a pass as soon as it is made, which may be before `attach`. In a fresh training that
pass goes on as it is; behind a resume another one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from resilience_sdk.adapters._timed_loader import Passes, TimedLoader
from resilience_sdk.adapters.deepspeed.place import is_ordered_by_number
from resilience_sdk.core.iterated_class import iterated_by, set_class
from resilience_sdk.core.resume_limits import note


def is_repeating(loader: Any) -> bool:
    """Tell whether it is a `RepeatingLoader` of DeepSpeed's."""
    return _is_named(loader, "RepeatingLoader") and hasattr(loader, "loader") and hasattr(loader, "data_iter")


def is_own(loader: Any) -> bool:
    """Tell whether it is the loader that DeepSpeed makes of `training_data=`."""
    return _is_named(loader, "DeepSpeedDataLoader") and hasattr(type(loader), "__next__")


def counts_by_itself(loader: Any) -> bool:
    """Tell whether DeepSpeed saves the place of its sampler, as for curriculum learning."""
    return is_own(loader) and bool(getattr(loader, "curriculum_learning_enabled", False))


def _is_named(loader: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(loader).__mro__)


def note_curriculum() -> None:
    """Say what is not exact where DeepSpeed counts."""
    note(
        "deepspeed curriculum",
        "the place in the data, to the batch",
        "with curriculum learning DeepSpeed saves how many samples its sampler has given, and these include what its "
        "workers have read ahead",
        "set data_sampling.num_workers to 0 in the configuration",
    )


def note_taken_over(loader: Any, source: Any) -> None:
    """Say what is not exact of a pass that was begun before `attach`."""
    workers = getattr(loader, "num_local_io_workers", None) or getattr(loader, "num_workers", 0)
    if workers:
        note(
            "deepspeed begun before",
            "what the workers of the loader draw at random in its first pass"
            + ("" if is_ordered_by_number(source) else ", and the order of that pass"),
            "RepeatingLoader has begun it before attach(), where the resume is made",
            "make the RepeatingLoader behind attach()",
        )


def source_of(loader: Any) -> Any:
    """Return a `DataLoader` that draws the order as DeepSpeed's own does; any other loader is returned as it is."""
    from torch.utils.data import DataLoader

    if not is_own(loader):
        return loader
    try:
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=loader.data_sampler,
            drop_last=bool(loader.dataloader_drop_last),
        )
    except (AttributeError, TypeError, ValueError):  # of another version, or of a stream
        return loader


class OwnPasses(Passes, Protocol):
    """Who is told of the passes over a loader that may be begun already."""

    def takes_over(self, loader: Any) -> bool:
        """Count a pass that was begun before `attach`; False where another one is to take its place."""
        ...


class TimedOwnLoader(TimedLoader):
    """Puts the subclass on the loader of `training_data=`: `iter()` begins a pass, and `next()` goes on with it."""

    def __init__(self, loader: Any, loop: OwnPasses) -> None:
        """Time its batches from now on, and tell the `loop` of its passes."""
        self._loader, self._plain, self.loop = loader, type(loader), loop
        self._passes = loop
        self.due: Callable[[], None] | None = None
        self.took = None
        self.fetched = 0
        self.is_on = True
        self._pass: Iterator[Any] | None = None
        set_class(loader, _passing(self._plain, self))

    def begin(self, loader: Any) -> None:
        """Begin a pass."""
        self.pass_begins()
        self._pass = self.watch(self.make(lambda: self._made(loader)))

    def _made(self, loader: Any) -> Iterator[Any]:
        self._plain.__iter__(loader)
        return _Fetched(loader, self._plain)

    def next(self, loader: Any) -> Any:
        """Return the next batch of the pass that is under way."""
        if self._pass is None:
            if self._passes.takes_over(loader):
                self._pass = self.watch(_Fetched(loader, self._plain))
            else:
                self.begin(loader)
        assert self._pass is not None
        return next(self._pass)


class _Fetched:
    """The batches that the loader itself gives."""

    def __init__(self, loader: Any, plain: Any) -> None:
        self._loader, self._plain = loader, plain

    def __iter__(self) -> _Fetched:
        return self

    def __next__(self) -> Any:
        return self._plain.__next__(self._loader)


def _passing(plain: Any, watch: TimedOwnLoader) -> type:
    def begin(self: Any) -> Any:
        watch.begin(self)
        return self

    def fetch(self: Any) -> Any:
        return watch.next(self)

    kind: Any = iterated_by(plain, begin)
    kind.__next__ = fetch
    return kind  # type: ignore[no-any-return]
