"""`torch.save` as injected faults and rehearsals meet it: a listener hears of each save whose bytes are written.

A tensor that is pickled (by `all_gather_object`, by a queue) has torch save its storage into memory: that is none of
the program's saves.

The save has not returned then, so a checkpoint that is written aside has not got its name yet. What a listener does to
the file, or raises, is what a death or a full disk in the middle of the save would leave.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from resilience_sdk.system.imports import when_imported

_MODULE = "torch.serialization"
_STORAGES = ("UntypedStorage", "TypedStorage")  # of torch, which is not imported yet where this module is

SaveListener = Callable[[Any], None]
"""Takes what `torch.save` was told to write into: a path or a file."""

_listeners: list[SaveListener] = []
_lookers: list[Callable[[Any], None]] = []
_is_installed = False


def listen(listener: SaveListener) -> None:
    """Have `listener` hear of every later `torch.save` of this process, on the thread that saves."""
    global _is_installed
    _listeners.append(listener)
    if not _is_installed:
        _is_installed = True
        when_imported(_MODULE, _wrap)


def look_into(looker: Callable[[Any], None]) -> None:
    """Have `looker` see what is about to be saved, each time before the listeners hear of it."""
    _lookers.append(looker)


def ignore(listener: SaveListener) -> None:
    """Have `listener` hear of no more saves; one that hears of none is passed over."""
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)


def tear(target: Any) -> None:
    """Cut what was just saved in half; what is in memory only, and so on no disk, stays as it is. Raises OSError."""
    if isinstance(target, (str, os.PathLike)):
        os.truncate(target, os.path.getsize(target) // 2)
        return
    with contextlib.suppress(AttributeError, ValueError):  # io.UnsupportedOperation is a ValueError too
        target.flush()
        descriptor = target.fileno()
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)


def place_of(target: Any) -> str | None:
    """Return the file that a save goes into, where it says so."""
    name = target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", None)
    return os.path.abspath(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else None


def _wrap(module: ModuleType) -> None:
    """Put the listeners behind `torch.save`, under both of its names."""
    import sys

    original = module.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        is_of_program = type(obj).__name__ not in _STORAGES
        for looker in _lookers if is_of_program else ():
            looker(obj)
        original(obj, f, *args, **kwargs)
        for listener in tuple(_listeners) if is_of_program else ():
            listener(f)

    module.save = save  # type: ignore[attr-defined]
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "save", None) is original:
        torch.save = save  # type: ignore[attr-defined]
