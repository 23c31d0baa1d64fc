"""The rank's side of its page."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilience_sdk.rank_page import layout as at
from resilience_sdk.short_names import shortened

_LONGEST_S = 1e9  # 30 years stand for an endless timeout, which fits into no word


class RankPage:
    """A mapped rank page, open for writing by the process that it describes.

    `words` is the page as a writable sequence of u64; the hot path stores into it directly. The methods
    here are for what changes rarely; any thread may call those that set, the recorder's lock guards those that add.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        """Wrap an existing mapping; use `create`."""
        self.path = path
        self._mapping = mapping
        self._lock = threading.RLock()  # the training thread and the helper thread both change the header
        self.bytes = memoryview(mapping)
        self.words: memoryview[int] = self.bytes.cast("Q")

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        pid: int,
        start_ticks: int,
        rank: int,
        local_rank: int,
        world_size: int,
        attempt: int,
        created_ns: int,
        facts: dict[str, str],
    ) -> RankPage:
        """Create the file exclusively, reserve its space and fill in the identity.

        Raises OSError, also for a full file system: space is reserved before the mapping is made, because a
        store into a page that cannot be backed is a SIGBUS.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            _reserve(fd)
            mapping = mmap.mmap(fd, at.PAGE_BYTES)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        page = cls(path, mapping)
        q = page.words
        q[at.W_SEQUENCE] = 1
        q[at.W_VERSION] = at.VERSION
        q[at.W_PID] = pid
        q[at.W_START_TICKS] = start_ticks
        q[at.W_ATTEMPT] = attempt
        q[at.W_CREATED_NS] = created_ns
        page._set_identity(rank, local_rank, world_size)
        page._write_text(at.TEXT_AT, at.TEXT_BYTES, json.dumps(facts))
        q[at.W_SEQUENCE] = 2
        q[at.W_MAGIC] = at.MAGIC
        return page

    def set_identity(self, rank: int, local_rank: int, world_size: int) -> None:
        """Correct who the page belongs to, once the process group is known."""
        with self._changing():
            self._set_identity(rank, local_rank, world_size)

    def set_flag(self, flag: int, on: bool = True) -> None:
        """Set or clear one FLAG_ bit."""
        with self._lock:
            flags = self.words[at.W_FLAGS]
            self.words[at.W_FLAGS] = flags | flag if on else flags & ~flag

    def set_paused(self, depth: int, reason: str, resumed_ns: int = 0) -> None:
        """Publish that deadlines are suspended (`depth` > 0), and why, or since when they are not any more."""
        with self._changing():
            self.words[at.W_RESUMED_NS] = resumed_ns
            self._write_text(at.PAUSE_TEXT_AT, at.PAUSE_TEXT_BYTES, reason)
            self.words[at.W_PAUSED] = depth

    def set_resumed(self, now_ns: int) -> None:
        """Publish that no deadline began before now."""
        self.words[at.W_RESUMED_NS] = now_ns

    def add_name(self, name: str, kind: str, timeout_s: float | None) -> int | None:
        """Append to the table of names and return the index, or None when the table is full."""
        index = self.words[at.W_NAMES]
        if index >= at.NAME_SLOTS:
            return None
        with self._changing():
            self.words[at.name_at(index) + at.N_KIND] = at.KINDS.index(kind)
            text = shortened(name, at.NAME_BYTES)
            self._write_text((at.name_at(index) + at.N_TEXT) * 8, at.NAME_BYTES, text)
            self.words[at.W_NAMES] = index + 1
        self.set_timeout(index, timeout_s)
        return index

    def set_timeout(self, name_index: int, timeout_s: float | None) -> None:
        """Publish the timeout that a section was given as an argument (seconds), or None for a learned one."""
        nanoseconds = 0 if timeout_s is None else max(1, int(min(timeout_s, _LONGEST_S) * 1e9))
        self.words[at.name_at(name_index) + at.N_TIMEOUT_NS] = nanoseconds

    def add_lane(self, thread_id: int) -> int | None:
        """Take the next lane for a thread and return its index, or None when all are taken."""
        index = self.words[at.W_LANES]
        if index >= at.LANE_SLOTS:
            return None
        self.words[at.lane_at(index) + at.L_THREAD] = thread_id
        self.words[at.W_LANES] = index + 1
        return index

    def add_ring(self, lane: int, name_index: int) -> int | None:
        """Take the next ring for a name on a lane and return its first word, or None when all are taken."""
        index = self.words[at.W_RINGS]
        if index >= at.RING_SLOTS:
            return None
        first = at.ring_at(index)
        self.words[first + at.R_NAME_LANE] = name_index | lane << 32
        self.words[at.W_RINGS] = index + 1
        return first

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep readers off while words change that belong together.

        An odd number that stayed would make the page unreadable for good, and its rank look stuck. So one that an
        exception between two bytecodes left odd is taken as it is, and made even by the next change.
        """
        with self._lock:
            during = self.words[at.W_SEQUENCE] | 1
            try:
                self.words[at.W_SEQUENCE] = during
                yield
            finally:
                self.words[at.W_SEQUENCE] = during + 1

    def _set_identity(self, rank: int, local_rank: int, world_size: int) -> None:
        self.words[at.W_RANK] = rank
        self.words[at.W_LOCAL_RANK] = local_rank
        self.words[at.W_WORLD_SIZE] = world_size

    def _write_text(self, offset: int, size: int, text: str) -> None:
        data = text.encode(errors="replace")[:size]
        self.bytes[offset : offset + size] = data + bytes(size - len(data))


def _reserve(fd: int) -> None:
    """Give the file its full size, backed by real space where the platform can promise that."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, at.PAGE_BYTES)
    else:  # macOS: pages are in the temporary directory, on a disk
        os.ftruncate(fd, at.PAGE_BYTES)
