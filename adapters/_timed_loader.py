"""A loader whose iteration is timed.

`for batch in loader` asks the loader's class, not the object. So the object gets a subclass of its own class for as
long as it is watched: it stays what it was for `isinstance`, its attributes and its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import get_ident
from time import monotonic_ns
from typing import Any, Protocol

from resilience_sdk.core.iterated_class import iterated_by, set_class
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.lookup import BLOCKS

_END = object()


class Passes(Protocol):
    """Who is told of the passes over a loader."""

    def pass_begins(self) -> None:
        """Hear that a new iterator is about to be made."""
        ...

    def make_pass(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return what `make()` does: a new iterator of the loader."""
        ...

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return what is iterated in the place of a new iterator."""
        ...

    def pass_ends(self) -> None:
        """Hear that a pass is through."""
        ...


class TimedLoader:
    """Puts the subclass on a loader; `restore()` takes it off. Iterators that exist then go on, untimed."""

    def __init__(self, loader: Any, loop: Passes | None = None) -> None:
        """Time the iterators of `loader` from now on, and tell the `loop` of its passes.

        Raises:
            ConfigError: The loader's class cannot be exchanged, or it is no iterable.
        """
        self._loader = loader
        self.due: Callable[[], None] | None = None
        """What is called before the next batch is fetched, and each one after that until it is None again."""
        self.fetched = 0
        """How many batches were asked for."""
        self.loop = loop
        self.took: Callable[[Any], None] | None = None
        """What each batch is given to before the loop gets it."""
        self._plain = type(loader)
        self.is_on = True
        """Whether the waits are timed."""
        if not hasattr(self._plain, "__iter__") or hasattr(self._plain, "__next__"):
            raise ConfigError(
                f"attach(loader={loader!r}): expected what each epoch iterates anew, such as a DataLoader; "
                "of an iterator write `for batch in straggler.iterate(batches)` instead"
            )
        try:
            set_class(loader, _timed_class(self._plain, self))
        except TypeError:
            raise ConfigError(
                f"attach(loader=<{self._plain.__qualname__}>): objects of this class cannot be watched; leave it out, "
                "and write `for batch in straggler.iterate(loader)` in the loop"
            ) from None

    def restore(self) -> None:
        """Give the loader its own class back. May be repeated."""
        if self.is_on:
            self.is_on = False
            set_class(self._loader, self._plain)

    def pass_begins(self) -> None:
        """Tell the loop that a new iterator is about to be made."""
        if self.loop is not None and self.is_on:
            self.loop.pass_begins()

    def make(self, plain: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return a new iterator of the loader's own."""
        return plain() if self.loop is None or not self.is_on else self.loop.make_pass(plain)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return what is iterated in the place of a new iterator."""
        if self.loop is not None and self.is_on:
            batches = self.loop.walk(batches)
        return _TimedBatches(batches, self)


class _TimedBatches:
    """An iterator around the loader's own, which lends it all other attributes."""

    __slots__ = ("_batches", "_watch")

    def __init__(self, batches: Iterator[Any], watch: TimedLoader) -> None:
        self._batches = batches
        self._watch = watch

    def __iter__(self) -> _TimedBatches:
        return self

    def __next__(self) -> Any:
        batches, watch = self._batches, self._watch
        if not watch.is_on:
            return next(batches)
        watch.fetched += 1
        if watch.due is not None:
            watch.due()
        try:  # `find_own_block`, written out: in every step a call that can be spared is
            block: Any = BLOCKS["data"]
            is_own = block.lane.ident == get_ident()
        except (KeyError, AttributeError):
            is_own = False
        if not is_own:
            block = lookup.find_own_block("data", "io")
        if block is None or not block.begin(monotonic_ns()):  # the script times it itself
            batch = next(batches, _END)
        else:
            try:
                batch = next(batches, _END)
            except BaseException:
                block.drop(monotonic_ns())
                raise
            block.end(monotonic_ns())
        if batch is _END:
            if watch.loop is not None:
                watch.loop.pass_ends()
            raise StopIteration
        if watch.took is not None:
            watch.took(batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _timed_class(plain: Any, watch: TimedLoader) -> type:
    """Return a subclass of the loader's class whose iterators are watched."""

    def timed_iter(self: Any) -> Iterator[Any]:
        watch.pass_begins()
        return watch.watch(watch.make(lambda: plain.__iter__(self)))

    return iterated_by(plain, timed_iter)
