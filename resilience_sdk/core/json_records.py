"""JSON records: the one codec between attrs records and JSON.

Pure. The types of a record's fields say what may stand in the JSON. What another node sends is distrusted: one value
that does not fit makes the whole text unreadable, so that nobody reasons on half a record. What people and other
versions write can be read leniently, as far as it fits.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

_Record = TypeVar("_Record")
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))
_MAPPINGS = (dict, collections.abc.Mapping)
_SEQUENCES = (list, tuple, collections.abc.Sequence)
_PLAIN = (float, int, str, bool, type(None))
_MAX_INTEGER = 1 << 63


def to_values(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Return a record, and those within it, as the JSON values of its fields: lists for tuples, the values of enums."""
    return {field.name: _plain(getattr(record, field.name)) for field in attrs.fields(type(record))}


def to_text(record: attrs.AttrsInstance) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(to_values(record), separators=(",", ":"))


def from_values(cls: type[_Record], data: Any, *, lenient: bool = False) -> _Record:
    """Return the record of class `cls` that JSON values describe; raise ValueError where they describe none.

    A field that is missing has its default, one that the class does not have is passed over. `lenient`: what does not
    fit is None where the field may be None, and left out of a list.
    """
    try:
        record: _Record = _structure(cls, data, lenient)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"expected the JSON object of a {cls.__name__}: {error}") from None
    return record


def from_text(cls: type[_Record], text: str | bytes) -> _Record | None:
    """Return the record of class `cls` in a JSON text, or None when it holds none."""
    try:
        return from_values(cls, json.loads(text))
    except (ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if attrs.has(type(value)):
        return to_values(value)
    if isinstance(value, Mapping):
        # Scores of 16,384 ranks: most values are plain already.
        return {str(key): item if type(item) in _PLAIN else _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _structure(kind: Any, value: Any, lenient: bool) -> Any:
    """Return `value` as an object of that type; raise TypeError or ValueError when it is none."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in _UNIONS:
        return _one_of(of, value, lenient)
    if origin in _SEQUENCES:
        return _items(of, value, lenient)
    if origin in _MAPPINGS:
        items = _checked(value, dict).items()
        if of[1] is float:
            return {_key(of[0], key): item if type(item) is float else _number(item) for key, item in items}
        return {_key(of[0], key): _structure(of[1], item, lenient) for key, item in items}
    if origin is typing.Literal:
        return of[of.index(value)]
    if attrs.has(kind):
        return _record(kind, _checked(value, dict), lenient)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_checked(value, str))
    if kind is pathlib.Path:
        return pathlib.Path(_checked(value, str))
    if kind is float:
        number = _number(value)
        if lenient and not math.isfinite(number):
            raise ValueError("not a finite number")
        return number
    if kind is int and not lenient and abs(_checked(value, int)) >= _MAX_INTEGER:
        raise OverflowError(f"{value} is too large")
    return _checked(value, kind)


def _record(cls: Any, data: dict[str, Any], lenient: bool) -> Any:
    values = {}
    for name, kind in _kinds(cls).items():
        if name in data or lenient:
            values[name] = _structure(kind, data.get(name), lenient)
    return cls(**values)


@functools.lru_cache(maxsize=64)
def _kinds(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


def _one_of(kinds: tuple[Any, ...], value: Any, lenient: bool) -> Any:
    if type(value) in kinds and type(value) is not float:  # an integer stays one, though it would do for a float
        return value
    for kind in kinds:
        try:
            return _structure(kind, value, lenient)
        except (TypeError, ValueError, OverflowError):
            continue
    if lenient and type(None) in kinds:
        return None
    raise TypeError(f"{type(value).__name__} is none of {kinds}")


def _items(of: tuple[Any, ...], value: Any, lenient: bool) -> Any:
    if len(of) == 2 and of[1] is not Ellipsis:
        first, second = _checked(value, list)
        return _structure(of[0], first, lenient), _structure(of[1], second, lenient)
    if not lenient:
        return tuple(_structure(of[0], item, lenient) for item in _checked(value, list))
    found = []
    for item in value if isinstance(value, list) else ():
        try:
            found.append(_structure(of[0], item, lenient))
        except (TypeError, ValueError, OverflowError):
            continue
    return tuple(found)


def _key(kind: Any, text: Any) -> Any:
    return int(text) if kind is int else _checked(text, str)


def _number(value: Any) -> float:
    return float(value) if type(value) is int else _checked(value, float)


def _checked(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} is not {kind}")
    return value
