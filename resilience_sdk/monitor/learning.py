"""What the monitor learns from pages: durations for the deadlines, kept in `RUN_DIR/timeouts.json`."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from resilience_sdk.hang import DeadlineBook
from resilience_sdk.hang.gaps import GapWatch
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.rank_page import Passes
from resilience_sdk.rank_page.layout import DEVICE_KINDS, WORK
from resilience_sdk.settings import Settings
from resilience_sdk.whole_file import write_whole

_NANO = 1e9
_SAVE_PERIOD_S = 60.0
_MOST_BYTES = 8 << 20


class Learner:
    """Feeds a `DeadlineBook` from the ranks of one node and keeps it on disk."""

    def __init__(self, path: Path, settings: Settings, script: str) -> None:
        """Learn into `path`; what it holds already is where learning begins."""
        self._path = path
        self._settings = settings
        self._script = script
        self._book: DeadlineBook | None = None
        self._gaps: dict[Path, GapWatch] = {}
        self._started: set[Path] = set()
        self._saved_at = time.monotonic()

    @property
    def book(self) -> DeadlineBook:
        """The deadlines; before the first rank is known, the ones of a world of one."""
        return self._book if self._book is not None else DeadlineBook(self._settings)

    def begin_attempt(self, world_size: int, local_ranks: int) -> None:
        """Start an attempt; the first one decides for which world the deadlines are learned."""
        if self._book is None:
            self._book = DeadlineBook.from_json(
                self._read(),
                self._settings,
                script=self._script,
                world_size=world_size,
                pool=max(1, local_ranks),
            )
        else:
            self._book.begin_attempt()
        self._gaps.clear()
        self._started.clear()

    def look(self, watched: WatchedRank, now_ns: int) -> list[Passes]:
        """Take what a rank has completed since the last look, and return it: nobody else can read it any more."""
        book = self.book
        completed = watched.reader.passes()
        for new in completed:
            if new.kind not in (*DEVICE_KINDS.values(), WORK):  # nobody waits in it, so it has no deadline
                book.add(new.name, new.kind, [sample / _NANO for sample in new.samples_ns], new.start == 0)
        snapshot = watched.snapshot
        gaps = self._gaps.setdefault(watched.stem, GapWatch())
        if ended := gaps.look(snapshot, now_ns):
            book.add_out_of_section(ended)
        if snapshot.first_beat_ns is not None and watched.stem not in self._started:
            self._started.add(watched.stem)
            book.add_startup((snapshot.first_beat_ns - snapshot.created_ns) / _NANO)
        return completed

    def save_now_and_then(self) -> None:
        """Write the file if it was not written for a while."""
        if time.monotonic() - self._saved_at > _SAVE_PERIOD_S:
            self.save()

    def save(self) -> None:
        """Write the file, whole or not at all; a full disk costs what was learned, nothing else."""
        self._saved_at = time.monotonic()
        if self._book is None:
            return
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(self._book.to_json()))

    def _read(self) -> object:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if self._path.stat().st_size <= _MOST_BYTES:
                return json.loads(self._path.read_text())
        return None
