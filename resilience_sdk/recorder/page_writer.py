"""The rank's side of its page: RankPage, and the words that the node's monitor writes into it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resilience_sdk.core.redaction import redact_text
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_layout import shortened
from resilience_sdk.recorder.page_reader import map_page


def _word(index: int, about: str) -> Any:
    return property(lambda control: control._words[index], doc=about)


class ControlWords:
    """A rank page mapped for writing by the monitor, which writes CONTROL and DEADLINE_NS only. One thread.

    Each word is one aligned store or load; nothing here relies on the order in which others see two of them.
    """

    def __init__(self, path: Path) -> None:
        """Map the page. Raises OSError when it is not a private file of ours, or too small."""
        self._mapping = map_page(path, writable=True)
        self._bytes = memoryview(self._mapping)
        self._words: memoryview[int] = self._bytes.cast("Q")

    checks = _word(at.W_CHECKS, "How often the rank has called `preemption.check()`.")
    acknowledged = _word(at.W_ACKNOWLEDGED, "The newest round that the rank has acknowledged.")
    notice = _word(at.W_NOTICE, "The signal that asked this rank to leave, or one of NOTICE_NAMES; 0: nobody has.")
    control = _word(at.W_CONTROL, "What was proposed last, by this monitor or the one before.")
    deadline = _word(at.W_DEADLINE_NS, "When the rank's time is over (monotonic nanoseconds), 0 when nobody has said.")

    def propose(self, control: int) -> None:
        """Show the rank a proposal."""
        self._words[at.W_CONTROL] = control

    def set_deadline(self, deadline_ns: int) -> None:
        """Tell the rank when its time is over (monotonic nanoseconds)."""
        self._words[at.W_DEADLINE_NS] = deadline_ns

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._bytes.release()
        self._mapping.close()


# Of <sys/mman.h> on Linux
_MAP_FIXED, _MREMAP_MAYMOVE = 0x10, 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_FACT_BYTES, _ESCAPED_FACT_BYTES = 200, 32  # of a host or a script; of one in which JSON writes six bytes for one
_LONGEST_S = 1e9  # 30 years stand for an endless timeout, which fits into no word


class RankPage:
    """A mapped rank page, open for writing by the process that it describes.

    `words` is the page as a writable sequence of u64; the hot path stores into it directly. The methods
    here are for what changes rarely; any thread may call those that set, the recorder's lock guards those that add.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        """Wrap an existing mapping; use `create`."""
        self.path = path
        self.inode = 0
        """The file that is mapped, by its number in the file system."""
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
            inode = os.fstat(fd).st_ino
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        page = cls(path, mapping)
        page.inode = inode
        q = page.words
        q[at.W_SEQUENCE] = 1
        q[at.W_VERSION] = at.VERSION
        q[at.W_PID] = pid
        q[at.W_START_TICKS] = start_ticks
        q[at.W_ATTEMPT] = attempt
        q[at.W_CREATED_NS] = created_ns
        page._set_identity(rank, local_rank, world_size)
        page._write_text(at.TEXT_AT, at.TEXT_BYTES, _facts_text(facts))
        q[at.W_SEQUENCE] = 2
        q[at.W_MAGIC] = at.MAGIC
        return page

    def is_there(self) -> bool:
        """Tell whether the file that is mapped still has its name. One system call."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False

    def make_again(self) -> None:
        """Give the page a new file of its name, where the old one was removed. Any one thread.

        The new file takes the place of the old one at the same address, so the thread that trains stores on without
        noticing: before that into the old file, then into the new one. What it stored while the content was copied is
        brought along. Raises OSError, and leaves everything as it was, where that cannot be done.
        """
        if not sys.platform.startswith("linux"):
            raise OSError(95, "a page can be made again on Linux only")
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _reserve(fd)
            with self._lock:
                copy = bytes(self.bytes)
                os.pwrite(fd, copy, 0)
                _replace_mapping(self._mapping, fd, lambda old: self._bring_along(copy, old))
                self.inode = os.fstat(fd).st_ino
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)

    def _bring_along(self, copy: bytes, old: bytes) -> None:
        """Store what changed in the old file after `copy` was taken, unless it has changed again since."""
        if copy == old:
            return
        before, after = memoryview(copy).cast("Q"), memoryview(old).cast("Q")
        for index in range(at.PAGE_WORDS):
            if before[index] != after[index] and self.words[index] == before[index]:
                self.words[index] = after[index]

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
        """Append to the table of names and return the index, or None when the table is full.

        A page is read by other processes, which write names into files and know none of this one's secrets.
        """
        index = self.words[at.W_NAMES]
        if index >= at.NAME_SLOTS:
            return None
        with self._changing():
            self.words[at.name_at(index) + at.N_KIND] = at.KINDS.index(kind)
            text = shortened(redact_text(name), at.NAME_BYTES)
            self._write_text((at.name_at(index) + at.N_TEXT) * 8, at.NAME_BYTES, text)
            self.words[at.W_NAMES] = index + 1
        self.set_timeout(index, timeout_s)
        return index

    def set_joint(self, name_index: int) -> None:
        """Publish that passes of a section hold collectives."""
        with self._lock:
            self.words[at.W_JOINT] |= 1 << name_index

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

    def set_stepped(self, passes: Mapping[int, int]) -> None:
        """Publish that the first step is complete; `passes`: first word of a ring -> what it had passed until then."""
        for first, count in passes.items():
            self.words[at.BEFORE_AT + (first - at.RINGS_AT) // at.RING_WORDS] = count
        self.words[at.W_STEPPED] = 1  # last: whoever reads it finds the counts

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


def _facts_text(facts: Mapping[str, str]) -> str:
    """Return facts as JSON that fits its place: a reader takes all of it or nothing."""
    for most_bytes in (_FACT_BYTES, _ESCAPED_FACT_BYTES):
        short = {name: shortened(fact, most_bytes) for name, fact in facts.items()}
        text = json.dumps(short, ensure_ascii=False)
        if len(text.encode(errors="replace")) <= at.TEXT_BYTES:
            break
    return text


def _replace_mapping(mapping: mmap.mmap, fd: int, then: Callable[[bytes], None]) -> None:
    """Map the file `fd` at the address of `mapping`, and give what the old one holds in the end to `then`.

    The kernel changes the mapping in one step: a thread that stores there meanwhile waits for the end of it.
    """
    # PyDLL keeps the interpreter's lock, so that no thread of Python runs between the old file and the new one.
    libc: Any = ctypes.PyDLL(None, use_errno=True)
    for function in (libc.mmap, libc.mremap):
        function.restype = ctypes.c_void_p
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    size = ctypes.c_size_t(at.PAGE_BYTES)
    # An old size of 0 asks for a second mapping of the same shared pages.
    second = libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(0), size, ctypes.c_int(_MREMAP_MAYMOVE))
    if second in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        found = libc.mmap(ctypes.c_void_p(address), size, protection, flags, fd, ctypes.c_long(0))
        if found != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        then(ctypes.string_at(second, at.PAGE_BYTES))
    finally:
        libc.munmap(ctypes.c_void_p(second), size)


def _reserve(fd: int) -> None:
    """Give the file its full size, backed by real space where the platform can promise that."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, at.PAGE_BYTES)
    else:  # macOS: pages are in the temporary directory, on a disk
        os.ftruncate(fd, at.PAGE_BYTES)
