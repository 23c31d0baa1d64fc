"""`for` asks the class of what it iterates, not the object: what is watched gets a subclass of its own class."""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Iterator
from typing import Any


def set_class(item: Any, kind: type) -> None:
    """Exchange the class of an object, also where it shows another one as its `__class__`; raises TypeError."""
    object.__dict__["__class__"].__set__(item, kind)


_PLAIN = "_resilience_plain"


def plain_class(item: Any) -> Any:
    """Return the class that an object had before `iterated_by` made another one of it."""
    kind = type(item)
    while _PLAIN in vars(kind):
        kind = vars(kind)[_PLAIN]
    return kind


def iterated_by(plain: Any, iterate: Callable[[Any], Iterator[Any]]) -> type:
    """Return a subclass of a loader's class that `iterate` makes the iterators of; its copies are of the class."""

    def reduce(self: Any, protocol: Any) -> Any:
        # A copy is another loader, perhaps in another process: it must not lead back here.
        reduced = plain.__reduce_ex__(self, protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (plain.__new__, (plain, *reduced[1][1:]), *reduced[2:])
        return reduced

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__slots__": (), "__iter__": iterate, "__reduce_ex__": reduce, _PLAIN: plain}
        namespace |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}

    return types.new_class(plain.__name__, (plain,), exec_body=fill)
