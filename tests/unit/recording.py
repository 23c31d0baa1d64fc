"""A rank page that the calling process records into, read back as the monitor reads it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.page_reader import LaneView, PageReader, RankSnapshot
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Rank, Recorder

_numbers = itertools.count()


class Recording:
    """Lets `heartbeat()` and `section()` record into a new page until the end of the block."""

    def __init__(self, folder: Path, rank: Rank | None = None) -> None:
        self.page = RankPage.create(
            folder / f"{next(_numbers)}.page",
            pid=os.getpid(),
            start_ticks=1,
            rank=0,
            local_rank=0,
            world_size=1,
            attempt=0,
            created_ns=time.monotonic_ns(),
            facts={"host": "here", "script": "train.py"},
        )
        self.recorder = Recorder(self.page, rank)
        self.reader = PageReader(self.page.path)
        self._reads = threading.Lock()  # the monitor's reader is one thread's; in tests many threads ask
        self._starter = lookup.starter()

    def __enter__(self) -> Recording:
        lookup.set_starter(lambda: self.recorder)
        lookup.forget()
        return self

    def __exit__(self, *exception: object) -> None:
        lookup.set_starter(self._starter)
        lookup.forget()
        self.reader.close()
        self.page.path.unlink()

    def snapshot(self) -> RankSnapshot:
        """What the monitor sees, as soon as no other thread is in the midst of a change."""
        until = time.monotonic() + 20
        while (snapshot := self._snapshot()) is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        return snapshot

    def _snapshot(self) -> RankSnapshot | None:
        with self._reads:
            return self.reader.snapshot()

    def lane(self) -> LaneView:
        """What the monitor sees of the calling thread."""
        mine = threading.get_native_id()
        return next(lane for lane in self.snapshot().lanes if lane.thread_id == mine)

    def stack(self) -> list[str]:
        """Names of the sections that the calling thread has open, outermost first."""
        return [section.name for section in self.lane().stack]

    def harvest(self) -> dict[str, list[int]]:
        """New durations since the last call, by name and over all threads."""
        found: dict[str, list[int]] = {}
        with self._reads:
            for passes in self.reader.passes():
                found.setdefault(passes.name, []).extend(passes.samples_ns)
        return found
