"""Callbacks that become one of the framework's own when the first object of them is made, and not at the import."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

C = TypeVar("C", bound="Late")


class Late:
    """A class that gets more bases with its first object: those of `framework_bases()`, which may import them."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        """Make an object of this class with the bases; raises what `framework_bases` raises."""
        if hasattr(cls, "_late"):
            return object.__new__(cls)
        made: Any = _with_bases
        return object.__new__(made(cls, cls.framework_bases()))

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return the classes of the framework that an object has to be of."""
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """Pickle as the class that stands in its module: launchers send trainers to other processes."""
        cls = type(self)
        return _make, (getattr(cls, "_late", cls),), dict(vars(self))


@functools.cache
def _with_bases(cls: Any, bases: tuple[type, ...]) -> Any:
    named = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(cls.__name__, (cls, *bases), {**named, "_late": cls})


def _make(cls: type[C]) -> C:
    return cls.__new__(cls)  # type: ignore[no-any-return]
