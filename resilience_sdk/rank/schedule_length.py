"""The length that the schedules of a training are made for, as far as their functions name it.

A training that is made longer on purpose has other learning rates from its resume on, which is no fault of the resume.
torch's own schedulers come back with the length that they were saved with; that of a `LambdaLR` is in its function, and
DeepSpeed's and Megatron's keep it in attributes that they do not save, or that another one may take the place of.
"""

from __future__ import annotations

import functools
import types
from binascii import crc32
from collections.abc import Iterable, Iterator
from typing import Any

_MAX_DEPTH = 3
_MAX_MEMBERS = 16
_NUMBERS = (bool, int, float)
_LENGTHS = (
    *("total_num_steps", "warmup_num_steps", "total_size", "first_step_size", "second_step_size", "decay_step_size"),
    *("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps", "wd_incr_steps"),
)
"""Attributes of schedulers of DeepSpeed and Megatron that stay the same in a training."""


def length_of(schedulers: Iterable[Any], *limits: object) -> int:
    """Return a number for the length of a training: of its `limits`, and of its schedules; 0 where nothing is known.

    Nothing of the program's is called.
    """
    found: list[object] = [limit for limit in limits if limit is not None]
    for scheduler in schedulers:
        own = _attributes(scheduler)
        found.extend(own[name] for name in _LENGTHS if type(own.get(name)) in _NUMBERS)
        for function in _functions_of(scheduler):
            found.extend(_numbers(function, _MAX_DEPTH))
    return crc32(repr(found).encode()) if found else 0


def _functions_of(scheduler: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    own = _attributes(scheduler)
    inner = own.get("scheduler")  # of Accelerate's wrapper
    for one in (inner, *_some(own.get("_schedulers"))):
        if one is not None and depth:
            yield from _functions_of(one, depth - 1)
    yield from _some(own.get("lr_lambdas"))


def _numbers(value: Any, depth: int, names: tuple[str, ...] = ()) -> Iterator[object]:
    """Yield the numbers that a function goes by: of an object those that it asks for by these `names`."""
    kind = type(value)
    if kind in _NUMBERS:
        yield value
    elif depth and issubclass(kind, (list, tuple)):
        yield from (item for item in _some(value) if type(item) in _NUMBERS)
    elif depth and issubclass(kind, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _numbers(part, depth - 1, names)
    elif depth and kind is types.MethodType:
        yield from _numbers(value.__func__, depth, names)
        yield from _numbers(value.__self__, depth, value.__func__.__code__.co_names)
    elif depth and kind is types.FunctionType:
        for part in _known_to(value):
            yield from _numbers(part, depth - 1, value.__code__.co_names)
    else:
        own = _attributes(value)
        yield from (own[name] for name in names if type(own.get(name)) in _NUMBERS)


def _known_to(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is bound to the name yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    known = function.__globals__
    yield from (known[name] for name in function.__code__.co_names if name in known)


def _some(value: Any) -> list[Any]:
    return list(value[:_MAX_MEMBERS]) if isinstance(value, (list, tuple)) else []


def _attributes(value: Any) -> dict[Any, Any]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}
