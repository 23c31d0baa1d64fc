"""Write-once words of all nodes: wishes that lie in the page directory become words in the store, and words files.

A word is what `compare_set` made it first. Each is also appended to one list, so that a node finds what was decided
elsewhere with a single question. What a word means is known to those who wish (`preemption.cell`), not here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resilience_sdk.preemption.cell import make_link, read_link, wish_path, word_path
from resilience_sdk.preemption.protocol import Decision

_NAME = re.compile(r"[a-z]{1,16}-\d{1,6}", re.ASCII)
_VALUE = re.compile(r"[a-z0-9]{1,32}", re.ASCII)


class Board:
    """The words of one attempt, on one node. The relay's thread only; raises what the store raises."""

    def __init__(self, pages: Path, attempt: int, prefix: str) -> None:
        """Use keys of the store below `prefix`."""
        self._pages = pages
        self._attempt = attempt
        self._prefix = prefix
        self._log = f"{prefix}/words"
        self._known: dict[str, str] = {}
        self._wishes = wish_path(pages, attempt, "").name

    @property
    def known(self) -> dict[str, str]:
        """All words that are known to stand, by name."""
        return self._known

    def publish(self, store: Any) -> bool:
        """Carry the wishes that are new; tell whether there were any."""
        wishes = [(name, value) for name, value in self._wishes_left() if name not in self._known]
        for name, value in wishes:
            word = store.compare_set(f"{self._prefix}/word/{name}", "", value).decode("ascii", "replace")
            store.append(self._log, f"{name}={word}\n")
            self._take(name, word)
        return bool(wishes)

    def fetch(self, store: Any) -> None:
        """Take the words that others have made."""
        if store.check([self._log]):
            for line in store.get(self._log).decode("ascii", "replace").splitlines():
                name, _, word = line.partition("=")
                if name not in self._known:
                    self._take(name, word)

    def _wishes_left(self) -> Iterator[tuple[str, str]]:
        with contextlib.suppress(OSError):
            for found in os.listdir(self._pages):
                name = found.removeprefix(self._wishes)
                if name != found and _NAME.fullmatch(name):
                    value = read_link(self._pages / found)
                    if value is not None and _VALUE.fullmatch(value):
                        yield name, value

    def _take(self, name: str, word: str) -> None:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(word)):
            return  # what stands in the store is not to be trusted with our files
        path = word_path(self._pages, self._attempt, name)
        with contextlib.suppress(OSError):
            if not make_link(path, word) and read_link(path) == Decision.ALONE and word == Decision.VOID:
                _replace_link(path, word)  # it was decided here alone, and so by all
        self._known[name] = word


def _replace_link(path: Path, value: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    os.symlink(value, temporary)
    os.replace(temporary, path)
