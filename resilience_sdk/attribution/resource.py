"""What has to work again before another attempt makes sense: a place to write to, a host's name, a port. Pure.

Which one of them failed is told by the cause; its name is taken from the words of the error, where they give it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

STORAGE, NAME, PORT = "storage", "name", "port"
_KINDS = {
    "storage_full": STORAGE,
    "storage_io_error": STORAGE,
    "storage_readonly": STORAGE,
    "filesystem_stall": STORAGE,
    "checkpoint_stall": STORAGE,
    "dns_failure": NAME,
    "port_in_use": PORT,
}
_PATTERNS = {
    # OSError ends with the path; torch and C++ programs quote it somewhere.
    STORAGE: (r"\[Errno \d+\][^\n]*?: '(?P<name>/[^'\n]+)'", r"['\"](?P<name>/[^'\"\n]{1,1000})['\"]"),
    NAME: (
        r"getaddrinfo\(\s*'?(?P<name>[\w.-]+)",
        r"host='(?P<name>[\w.-]+)'",
        r"(?i)(?:resolve|host(?:name)?|address)\b[^\w\n]{0,4}(?:host(?:name)?[^\w\n]{1,4})?(?P<name>[\w-]+(?:\.[\w-]+)+)",
    ),
    PORT: (r"(?i)\bport[:= ]+(?P<name>\d{2,5})\b", r"\]?:(?P<name>\d{4,5})\b"),
}
_COMPILED = {kind: tuple(map(re.compile, patterns)) for kind, patterns in _PATTERNS.items()}


@attrs.frozen
class Resource:
    """One thing that failed. `name`: path, host or port; None where the error does not say."""

    kind: str
    name: str | None = None

    def __str__(self) -> str:
        """Return it in words that follow "waiting for"."""
        if self.kind == STORAGE:
            return f"{self.name or 'the run directory'} to take writes"
        if self.kind == NAME:
            return f"the name {self.name or 'of the host'} to resolve"
        return f"port {self.name or 'of the job'} to be free"


def failed_resource(cause: str, texts: Iterable[str]) -> Resource | None:
    """Return what has to work again after a fault of that cause, None where that is nothing that can be tried.

    `texts`: what the error said, the most telling first.
    """
    kind = _KINDS.get(cause)
    if kind is None:
        return None
    for text in texts:
        for pattern in _COMPILED[kind]:
            if found := pattern.search(text):
                return Resource(kind, found["name"])
    return Resource(kind)
