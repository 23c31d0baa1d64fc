"""Which Lightning a callback is made for: the class `Callback` of each of the two packages that is loaded.

`lightning.pytorch` and `pytorch_lightning` are copies of one another, and neither knows the other's classes. A callback
of ours is one of both, as far as they are there.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

from resilience_sdk.adapters._base import framework
from resilience_sdk.errors import MissingExtraError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

C = TypeVar("C", bound="LateCallback")


class LateCallback:
    """A class that becomes a `Callback` of the framework when its first object is made."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        """Make an object of this class that is a `Callback` too; raises MissingExtraError without Lightning."""
        if any(base.__name__ == "Callback" for base in cls.__mro__):
            return object.__new__(cls)
        made: Any = _with_bases
        return object.__new__(made(cls, _callback_classes()))

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


def _callback_classes() -> tuple[type, ...]:
    loaded = [sys.modules[name] for name in PACKAGES if hasattr(sys.modules.get(name), "Callback")]
    if not loaded:
        loaded = [_import_one()]
    return tuple(module.Callback for module in loaded)


def _import_one() -> Any:
    try:
        return framework(PACKAGES[0], "lightning")
    except MissingExtraError:
        if "pytorch_lightning" not in sys.modules and not _is_installed("pytorch_lightning"):
            raise
        return framework(PACKAGES[1], "pytorch_lightning")


def _is_installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None
