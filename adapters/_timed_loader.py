"""A loader whose iteration is timed as section `data`, though the script goes on using the very same object.

`for batch in loader` asks the loader's class, not the object. So the object gets a subclass of its own class for as
long as it is watched: it stays what it was for `isinstance`, its attributes and its methods.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Iterator
from threading import get_ident
from time import monotonic_ns
from typing import Any

from resilience_sdk import lanes
from resilience_sdk.errors import ConfigError
from resilience_sdk.lanes import BLOCKS

_END = object()


class TimedLoader:
    """Puts the subclass on a loader; `restore()` takes it off. Iterators that exist then go on, untimed."""

    def __init__(
        self,
        loader: Any,
        through: Callable[[Iterator[Any]], Iterator[Any]] | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Time the iterators of `loader` from now on.

        `at_end()`, if given, is called where a pass has no batch left. `through(batches)`, if given, returns what is
        iterated in the place of each new iterator: it may count, and leave out.

        Raises:
            ConfigError: The loader's class cannot be exchanged, or it is no iterable.
        """
        self._loader = loader
        self.due: Callable[[], None] | None = None
        """What is called before the next batch is fetched, and each one after that until it is None again."""
        self.at_end = at_end
        self._through = through
        self._plain = type(loader)
        self.is_on = True
        """Whether the waits are timed."""
        if not hasattr(self._plain, "__iter__") or hasattr(self._plain, "__next__"):
            raise ConfigError(
                f"attach(loader={loader!r}): expected what each epoch iterates anew, such as a DataLoader; "
                "of an iterator write `for batch in straggler.iterate(batches)` instead"
            )
        try:
            _set_class(loader, _timed_class(self._plain, self._watch))
        except TypeError:
            raise ConfigError(
                f"attach(loader=<{self._plain.__qualname__}>): objects of this class cannot be watched; leave it out, "
                "and write `for batch in straggler.iterate(loader)` in the loop"
            ) from None

    def restore(self) -> None:
        """Give the loader its own class back. May be repeated."""
        if self.is_on:
            self.is_on = False
            _set_class(self._loader, self._plain)

    def _watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._through is not None and self.is_on:
            batches = self._through(batches)
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
        if watch.due is not None:
            watch.due()
        try:  # `find_own_block`, written out: in every step a call that can be spared is
            block: Any = BLOCKS["data"]
            is_own = block.lane.ident == get_ident()
        except (KeyError, AttributeError):
            is_own = False
        if not is_own:
            block = lanes.find_own_block("data", "io")
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
            if watch.at_end is not None:
                watch.at_end()
            raise StopIteration
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _set_class(loader: Any, kind: type) -> None:
    """Exchange the class of an object, also where it shows another one as its `__class__`."""
    object.__dict__["__class__"].__set__(loader, kind)


def _timed_class(plain: Any, watch: Callable[[Iterator[Any]], Iterator[Any]]) -> type:
    """Return a subclass of the loader's class whose iterators are watched, and whose copies are of the class itself."""

    def timed_iter(self: Any) -> Iterator[Any]:
        return watch(plain.__iter__(self))

    def reduce(self: Any, protocol: Any) -> Any:
        # A copy is another loader, perhaps in another process: it must not lead back here.
        reduced = plain.__reduce_ex__(self, protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (plain.__new__, (plain, *reduced[1][1:]), *reduced[2:])
        return reduced

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__slots__": (), "__iter__": timed_iter, "__reduce_ex__": reduce}
        namespace |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}

    return types.new_class(plain.__name__, (plain,), exec_body=fill)
