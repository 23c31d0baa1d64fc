"""Learned timeouts of a run: durations from the pages and places of stillness, kept in `RUN_DIR/timeouts.json`.

A place is a section with the innermost frame of the user's (`hang.stalls.place_of`). What was survived is kept for
later jobs of the same run directory, the endings are this job's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.timeouts import GapWatch, LearnedTimeouts
from resilience_sdk.hang.timers import RankTimers
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.recorder.page_layout import DEVICE_KINDS, WORK
from resilience_sdk.recorder.page_reader import LanePasses

MAX_FREE = 3
"""Endings of one job by rules of ours that cost no restart of the budget."""
_MAX_PLACES = 128


@attrs.define
class Places:
    """What is remembered of places. The monitor's only thread."""

    job: str
    _survived: dict[str, float] = attrs.field(factory=dict)
    _endings: dict[str, int] = attrs.field(factory=dict)
    _free: int = 0

    def survive(self, place: str, still_s: float) -> None:
        """Remember that a rank stood still at a place for that long and went on."""
        longest_s = max(still_s, self._survived.pop(place, 0.0))
        self._survived[place] = longest_s  # at the end: the oldest are forgotten first
        while len(self._survived) > _MAX_PLACES:
            del self._survived[next(iter(self._survived))]

    def survived_s(self, place: str) -> float:
        """Return the longest stillness that was survived at a place, in seconds.

        Where the frame is not known, that of any place of the same section counts.
        """
        if not place.endswith(" at ?"):
            return self._survived.get(place, 0.0)
        section = place.removesuffix("?")
        return max((s for known, s in self._survived.items() if known.startswith(section)), default=0.0)

    def endings(self, place: str) -> int:
        """Return how often this job was ended at a place by a rule of ours."""
        return self._endings.get(place, 0)

    def end(self, place: str) -> bool:
        """Count one more ending of the job at a place; tell whether it costs no restart of the budget."""
        self._endings[place] = self._endings.get(place, 0) + 1
        is_free = self._endings[place] == 1 and self._free < MAX_FREE
        self._free += is_free
        return is_free

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {"job": self.job, "survived": self._survived, "endings": self._endings, "free": self._free}

    @classmethod
    def from_json(cls, data: object, job: str) -> Places:
        """Return what `to_json` described, of endings only those of this job; whatever is misshapen is skipped."""
        places = cls(job)
        if not isinstance(data, Mapping):
            return places
        for place, still_s in _items(data.get("survived")):
            if isinstance(still_s, (int, float)) and not isinstance(still_s, bool) and 0 < still_s < 1e9:
                places.survive(place, float(still_s))
        if data.get("job") == job:
            places._endings = {place: count for place, count in _items(data.get("endings")) if _is_count(count)}
            free: Any = data.get("free")
            places._free = free if _is_count(free) else len(places._endings)
        return places


def _items(value: object) -> list[tuple[str, Any]]:
    items = list(value.items()) if isinstance(value, Mapping) else []
    return [(key, item) for key, item in items[-_MAX_PLACES:] if isinstance(key, str)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


_NANO = 1e9
_SAVE_PERIOD_S = 60.0
_MOST_BYTES = 8 << 20


class Learner:
    """Feeds `LearnedTimeouts` from the ranks of one node and keeps it on disk."""

    def __init__(self, path: Path, settings: Settings, script: str, job: str = "") -> None:
        """Learn into `path`; what it holds already is where learning begins. `job` is the key of this job."""
        self._path = path
        self._settings = settings
        self._script = script
        self._book: LearnedTimeouts | None = None
        self._gaps: dict[Path, GapWatch] = {}
        self._started: set[Path] = set()
        self._late: dict[tuple[Path, str, str], float] = {}
        self._saved_at = time.monotonic()
        self.places = Places(job)

    @property
    def book(self) -> LearnedTimeouts:
        """The deadlines; before the first rank is known, the ones of a world of one."""
        return self._book if self._book is not None else LearnedTimeouts(self._settings)

    def begin_attempt(self, world_size: int, local_ranks: int, *, is_same: bool = False) -> None:
        """Start an attempt; the first one decides for which world the deadlines are learned.

        `is_same`: the file was written in this very attempt, which is for who only looks.
        """
        if self._book is None:
            known = self._read()
            self.places = Places.from_json(known.get("places") if isinstance(known, dict) else None, self.places.job)
            self._book = LearnedTimeouts.from_json(
                known,
                self._settings,
                script=self._script,
                world_size=world_size,
                pool=max(1, local_ranks),
                is_same_attempt=is_same,
            )
        else:
            self._book.begin_attempt()
        self._gaps.clear()
        self._started.clear()
        self._late.clear()

    def look(self, watched: WatchedRank, now_ns: int) -> list[LanePasses]:
        """Take what a rank has completed since the last look, and return it: nobody else can read it any more."""
        book = self.book
        completed = watched.reader.passes()
        for new in completed:
            if new.kind not in (*DEVICE_KINDS.values(), WORK):  # nobody waits in it, so it has no deadline
                book.add(new.name, new.kind, [sample / _NANO for sample in new.samples_ns], new.start == 0)
        if book.learns and not watched.snapshot.learns:
            book.keep()
        snapshot = watched.snapshot
        gaps = self._gaps.setdefault(watched.stem, GapWatch())
        if ended := gaps.look(snapshot, now_ns):
            book.add_out_of_section(ended)
        if snapshot.first_beat_ns is not None and watched.stem not in self._started:
            self._started.add(watched.stem)
            book.add_startup((snapshot.first_beat_ns - snapshot.created_ns) / _NANO)
        return completed

    def note_late(self, ranks: Sequence[WatchedRank], watches: Mapping[int, RankTimers]) -> None:
        """Learn of what is past its deadline as soon as it goes on: it was no hang.

        `watches` are the running deadlines by rank, as judged now; a rank that is paused, gone or done has none.
        """
        late: dict[tuple[Path, str, str], float] = {}
        for watched in ranks:
            w = watches.get(watched.rank)
            for timer in w.expired if w is not None else ():
                late[watched.stem, timer.name, timer.kind] = timer.elapsed_s
        living = {w.stem for w in ranks if w.alive and not w.snapshot.done and w.snapshot.paused is None}
        for key, elapsed_s in self._late.items():
            if key not in late and key[0] in living:
                self.book.survive(key[1], key[2], elapsed_s)
        self._late = late

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
            write_whole(self._path, json.dumps({**self._book.to_json(), "places": self.places.to_json()}))

    def _read(self) -> object:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if self._path.stat().st_size <= _MOST_BYTES:
                return json.loads(read_text(self._path))
        return None
