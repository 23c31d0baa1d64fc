"""The one list of causes, from `causes/*.toml`: category, action, meaning, how long it lasts, what it explains.

Each file is a category and each of its tables a cause; the tables' signs are read by `signatures`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import attrs

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

UNKNOWN = "unknown"


@attrs.frozen
class Cause:
    """One table of the taxonomy.

    `action` is the default; a verdict with more evidence may choose another. `persistence` is transient,
    persistent or mixed: whether the same attempt may succeed when it is simply repeated. `cap`: how often it
    may be repeated for this cause before somebody has to look. `explains`: the causes that are only its
    consequences where both are seen in one log.
    """

    category: str
    cause: str
    action: str
    meaning: str
    persistence: str = "mixed"
    cap: int = 1
    explains: frozenset[str] = frozenset()


@lru_cache(maxsize=1)
def causes() -> Mapping[str, Cause]:
    """Return every cause by its name, `unknown` included. Read once from the package's data."""
    return MappingProxyType({name: _cause(category, name, table) for category, name, table in _tables()})


def lookup(cause: str) -> Cause:
    """Return the entry of `cause`; a name that the taxonomy does not have gives the entry of `unknown`."""
    return causes().get(cause) or causes()[UNKNOWN]


def meaning(cause: str) -> str:
    """Return the sentence that explains `cause` to a person."""
    return lookup(cause).meaning


def cause_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the raw tables by cause, for what is kept beside the taxonomy in the same files."""
    return {name: table for _, name, table in _tables()}


@lru_cache(maxsize=1)
def _tables() -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    directory = resources.files(__package__) / "causes"
    files = sorted((entry for entry in directory.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name)
    return tuple(
        (entry.name.removesuffix(".toml"), name, table)
        for entry in files
        for name, table in tomllib.loads(entry.read_text(encoding="utf-8")).items()
    )


def _cause(category: str, name: str, table: Mapping[str, Any]) -> Cause:
    return Cause(
        category=category,
        cause=name,
        action=table["action"],
        meaning=table["meaning"],
        persistence=table["persistence"],
        cap=table["cap"],
        explains=frozenset(table.get("explains", ())),
    )
