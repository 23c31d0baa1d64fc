"""The one list of causes: category, default action and meaning of each, read from `taxonomy.tsv`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from types import MappingProxyType

import attrs

UNKNOWN = "unknown"


@attrs.frozen
class Cause:
    """One line of the taxonomy. `action` is the default; a verdict with more evidence may choose another."""

    category: str
    cause: str
    action: str
    meaning: str


@lru_cache(maxsize=1)
def causes() -> Mapping[str, Cause]:
    """Return every cause by its name, `unknown` included. Read once from the package's data."""
    text = (resources.files(__package__) / "taxonomy.tsv").read_text(encoding="utf-8")
    rows = [Cause(*line.split("\t")) for line in text.splitlines()[1:] if line]
    return MappingProxyType({row.cause: row for row in rows})


def lookup(cause: str) -> Cause:
    """Return the entry of `cause`; a name that the taxonomy does not have gives the entry of `unknown`."""
    return causes().get(cause) or causes()[UNKNOWN]


def meaning(cause: str) -> str:
    """Return the sentence that explains `cause` to a person."""
    return lookup(cause).meaning
