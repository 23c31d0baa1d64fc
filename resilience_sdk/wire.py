"""attrs records as JSON text and back, with every value checked: what comes from another node is distrusted.

Pure. The types of the fields say what may stand there; whatever does not fit makes the whole text unreadable,
so that nobody reasons on half a record.
"""

from __future__ import annotations

import collections.abc
import functools
import json
import types
import typing
from typing import Any, TypeVar

import attrs

_Record = TypeVar("_Record")
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))
_MOST_DIGITS = 1 << 63


def to_text(record: attrs.AttrsInstance) -> str:
    """Return an attrs record, and the records within it, as one line of JSON."""
    return json.dumps(attrs.asdict(record), separators=(",", ":"))


def from_text(cls: type[_Record], text: str | bytes) -> _Record | None:
    """Return the record of class `cls` in a JSON text, or None when it holds none."""
    try:
        data = json.loads(text)
        record: _Record = structure(cls, data)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return record


def structure(kind: Any, value: Any) -> Any:
    """Return `value` as an object of that type; raise TypeError or ValueError when it is none."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind is None or kind is type(None):
        return _same(value is None, value, kind)
    if origin in _UNIONS:
        return _one_of(of, value)
    if origin is tuple:
        return tuple(structure(of[0], item) for item in _checked(value, list))
    if origin in (collections.abc.Mapping, dict) and of[1] is float:
        # Scores of 16,384 ranks: most values are floats already.
        return {
            _key(of[0], key): item if type(item) is float else structure(float, item)
            for key, item in _checked(value, dict).items()
        }
    if origin in (collections.abc.Mapping, dict):
        return {_key(of[0], key): structure(of[1], item) for key, item in _checked(value, dict).items()}
    if attrs.has(kind):
        return _record(kind, _checked(value, dict))
    if kind is float:
        return float(_same(type(value) in (int, float), value, kind))
    if kind is int:
        return _same(type(value) is int and abs(value) < _MOST_DIGITS, value, kind)
    return _same(type(value) is kind, value, kind)


def _record(cls: Any, data: dict[str, Any]) -> Any:
    """Make a record; a field that the sender does not know has its default, one that we do not know is skipped."""
    values = {}
    for name, kind in _fields(cls).items():
        if name in data:
            values[name] = structure(kind, data[name])
    return cls(**values)


@functools.lru_cache(maxsize=64)
def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


def _one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return structure(kind, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{type(value).__name__} is none of {kinds}")


def _key(kind: Any, text: Any) -> Any:
    return int(text) if kind is int else _checked(text, str)


def _checked(value: Any, kind: type) -> Any:
    return _same(type(value) is kind, value, kind)


def _same(fits: bool, value: Any, kind: Any) -> Any:
    if not fits:
        raise TypeError(f"{type(value).__name__} is not {kind}")
    return value
