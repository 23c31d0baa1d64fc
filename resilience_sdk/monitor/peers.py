"""Which node of the job this is, and what our launcher has brought from the others.

There are several kinds of such words (hangs, stops, durations), each a file of its own that is replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Place:
    """Number of this node among `count`, and its name."""

    me: int
    count: int
    name: str

    @classmethod
    def of(cls, announcement: Mapping[str, Any], host: str) -> Place:
        """Return the place that our launcher has announced; alone and named by its host where it has not."""
        name = announcement.get("node_name")
        return cls(
            me=_integer(announcement.get("node"), 0),
            count=max(1, _integer(announcement.get("nodes"), 1)),
            name=name if isinstance(name, str) and name else host,
        )


@attrs.frozen
class Heard:
    """What the file holds: a text of each node, and whether the launcher says that this node gathers for all."""

    texts: Sequence[str]
    gathers: bool


class PeerFile:
    """The file with the words of one kind. The monitor's only thread."""

    def __init__(self, path: Path) -> None:
        """Read from `path`; there may be no such file yet."""
        self._path = path
        self._seen: tuple[int, int] | None = None

    def news(self, attempt: int) -> Heard | None:
        """Return what has come since the last call, None = nothing. Costs one stat then. Distrusts the content."""
        try:
            info = self._path.stat()
            if (seen := (info.st_ino, info.st_mtime_ns)) == self._seen:
                return None
            data = json.loads(self._path.read_bytes())
            texts = list(data["nodes"].values()) if data["attempt"] == attempt else []
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        self._seen = seen
        return Heard([text for text in texts if isinstance(text, str)], data.get("gathers") is True)


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
