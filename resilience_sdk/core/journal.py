"""The journal: its one vocabulary of events, append-only, one writer per file, the truth that all else follows from.

A line is one JSON object written by a single `write` to a file opened with O_APPEND, so a killed writer
leaves at most one torn last line, which readers skip and count.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk.core.atomic_write import share_like_directory
from resilience_sdk.core.console import doing, say_once
from resilience_sdk.core.plain_file import open_plain, open_to_read
from resilience_sdk.core.redaction import redact
from resilience_sdk.system import linux


class Event(str, Enum):
    """What can be journalled. Values are the contract; readers must accept names that they do not know."""

    RUN_START = "run_start"
    ATTEMPT_START = "attempt_start"
    RANK_START = "rank_start"
    FIRST_BEAT = "first_beat"
    SUSPECT = "suspect"
    STALL = "stall"
    STALL_END = "stall_end"
    CONFIRMED = "confirmed"
    DUMP = "dump"
    SIGNAL_SENT = "signal_sent"
    FAULT_INJECTED = "fault_injected"
    RANK_EXIT = "rank_exit"
    INCIDENT = "incident"
    RECOVERED = "recovered"
    DECISION = "decision"
    CKPT_BEGIN = "ckpt_begin"
    CKPT_COMMIT = "ckpt_commit"
    CKPT_FAIL = "ckpt_fail"
    CKPT_SKIP = "ckpt_skip"
    CKPT_QUARANTINE = "ckpt_quarantine"
    FRAMEWORK_CKPT = "framework_ckpt"
    RESUME = "resume"
    RESUME_LIMIT = "resume_limit"
    RESUME_CHECK = "resume_check"
    RESUME_NOT_EXACT = "resume_not_exact"
    PREEMPT_NOTICE = "preempt_notice"
    STOP_AGREED = "stop_agreed"
    STRAGGLER = "straggler"
    NUMERICS = "numerics"
    METRICS = "metrics"
    STEP_TIME = "step_time"
    PROGRESS = "progress"
    TIME_SPENT = "time_spent"
    MEMORY = "memory"
    LOSS = "loss"
    HEALTH = "health"
    REPORT = "report"
    MONITOR_START = "monitor_start"
    MONITOR_REPLACED = "monitor_replaced"
    DEGRADED = "degraded"
    ATTEMPT_END = "attempt_end"
    FINISHED = "finished"


CURVES = frozenset({Event.PROGRESS, Event.LOSS})
"""Points of a curve: much of a long run's journal, and only for who draws it. Others read `without` them."""

VERSION = 1
_MAX_KEPT_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


class EventSink(Protocol):
    """Takes events, as a journal does."""

    def emit(self, event: Event, **facts: Any) -> None:
        """Take an event; never raises."""


class Journal:
    """Appends events of one process to its own file under `RUN_DIR/journal`.

    Thread-safe, and fork-safe in that a forked child must not use it (its parent owns the file). A write
    that fails is said once, and tried again with the next event: the journal never stops the process that keeps it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        writer: str,
        host: str,
        boot_id: str,
        job: str,
        attempt: int = 0,
        rank: int | None = None,
    ) -> None:
        """Open (lazily) `directory/<host>-<writer>-<pid>.jsonl`; `writer` is e.g. `launcher`, `monitor`, `rank3`."""
        self.path = directory / f"{file_prefix(host)}{writer}-{os.getpid()}.jsonl"
        self.attempt = attempt
        self.rank = rank
        self._identity = {"host": host, "boot_id": boot_id, "job": job}
        self._fd: int | None = None
        self._known: tuple[int, int] = (0, 0)
        self._is_torn = False
        self._kept: deque[bytes] = deque()
        """Lines that are not written yet, the oldest first: more than one where that was not possible."""
        self._lost = 0
        self._lock = threading.Lock()

    def emit(self, event: Event, *, step: int | None = None, attempt: int | None = None, **fields: Any) -> None:
        """Append one event; `fields` must be JSON values. Secrets are redacted. Never raises."""
        line = {
            "v": VERSION,
            "t": time.time(),
            "mono_ns": time.monotonic_ns(),
            **self._identity,
            "attempt": self.attempt if attempt is None else attempt,
            "rank": self.rank,
            "event": event.value,
            "step": step,
            **redact(fields),
        }
        try:
            data = (json.dumps(line, default=str, separators=(",", ":")) + "\n").encode()
        except (ValueError, TypeError) as error:
            say_once(f"journal:{self.path}", f"an event cannot be written into the journal {self.path}: {error}")
            return
        with self._lock:
            self._kept.append(data)
            self._write_kept()

    def close(self) -> None:
        """Close the file; a later `emit` reopens it."""
        with self._lock:
            if self._kept:
                self._write_kept()
            if self._kept or self._lost:
                count = len(self._kept) + self._lost
                say_once(f"journal lost:{self.path}", f"{count} events could not be written into {self.path}")
            if self._fd is not None:
                if linux.is_still(self._fd, self._known):
                    os.close(self._fd)
                self._fd = None

    def _write_kept(self) -> None:
        """Write what could not be written so far. Never raises; hold the lock."""
        was_late = len(self._kept) > 1
        try:
            fd = self._open()
            while self._kept:
                self._append(fd, self._kept[0])
                self._kept.popleft()
        except OSError as error:
            while sum(map(len, self._kept)) > _MAX_KEPT_BYTES:
                self._kept.popleft()
                self._lost += 1
            say_once(
                f"journal:{self.path}",
                f"cannot write the journal {self.path}: {error.strerror or error}; its newest events are kept in "
                "memory and written when that is possible again",
            )
            return
        if was_late:
            say_once(f"journal again:{self.path}", f"the journal {self.path} is written again")

    def _append(self, fd: int, data: bytes) -> None:
        """Write a line as a whole or not at all: what a full disk has cut off must not take the next line with it."""
        line = b"\n" + data if self._is_torn else data
        size = os.fstat(fd).st_size
        if os.write(fd, line) < len(line):
            self._is_torn = True
            os.ftruncate(fd, size)  # nobody else writes there
            self._is_torn = line is not data
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_torn = False

    def _open(self) -> int:
        """Return the descriptor of the file, which is made where there is none, and made again where it was removed."""
        old = self._fd
        if old is not None and not linux.is_still(old, self._known):
            old = None  # the program has closed what is not its own
        if old is not None and os.fstat(old).st_nlink:
            return old
        try:
            fd = linux.aside(open_plain(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW))
        except OSError:
            if old is None:
                raise
            return old  # removed with its directory: until that is made again the open file keeps what is written
        share_like_directory(fd, self.path.parent)
        if old is not None:
            _carry_over(old, fd)
            os.close(old)
        self._fd, self._known = fd, linux.identity(fd)
        # In a container that starts again, names and process numbers are those of the one before.
        self._is_torn = _ends_within_a_line(fd)
        return fd


def _carry_over(old: int, new: int) -> None:
    """Copy a file that was removed, as far as there is room, into the one that takes its place."""
    offset = 0
    with contextlib.suppress(OSError):
        while chunk := os.pread(old, _CHUNK_BYTES, offset):
            offset += len(chunk)
            while chunk:
                chunk = chunk[os.write(new, chunk) :]


def _ends_within_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


@attrs.frozen
class JournalContents:
    """What a journal directory holds: its events by time, and how many lines could not be read."""

    events: tuple[dict[str, Any], ...]
    torn_lines: int
    unreadable_files: tuple[str, ...]
    read_to: Mapping[str, int] = attrs.field(factory=dict)
    """How far each file was read, to the end of a line: for a `read_journal` of what follows."""


def journal_sizes(directory: Path) -> dict[str, int]:
    """Return how far each file of a journal directory has come, in bytes by name: for a `read_journal` of what follows.

    Opened, not looked up: only then a network file system tells the size as it is.
    """
    sizes: dict[str, int] = {}
    for path in directory.glob("*.jsonl"):
        with contextlib.suppress(OSError), open_to_read(path) as file:
            sizes[path.name] = os.fstat(file.fileno()).st_size
    return sizes


def read_journal(
    directory: Path,
    since: Mapping[str, int] | None = None,
    *,
    only: Collection[str] | None = None,
    without: Collection[Event] = (),
    only_ended: bool = False,
) -> JournalContents:
    """Read every file of a journal directory; torn lines and unreadable files are counted, never fatal.

    With `since` (see `journal_sizes`) only what was written after that; with `only` the files of these names alone.
    Events of the kinds `without` are passed over, which costs a tenth of reading them. `only_ended` leaves a last
    line that has no end yet, whole as it may look, to who goes on from `read_to`: it would be taken twice.
    """
    known = since or {}
    unwanted = _lines_of(without) if without else None
    events: list[dict[str, Any]] = []
    torn = 0
    unreadable: list[str] = []
    read_to: dict[str, int] = {}
    paths = sorted(directory.glob("*.jsonl") if only is None else (directory / name for name in only))
    for number, path in enumerate(paths):
        doing("reading the journal: file", number + 1, len(paths))
        try:
            offset = known.get(path.name, 0)
            with open_to_read(path) as file:
                file.seek(offset)
                data = file.read()
            read_to[path.name] = offset + data.rfind(b"\n") + 1
            data = data[: read_to[path.name] - offset] if only_ended else data
            found = list(parse_lines(data, unwanted))
            events += [event for event in found if event is not None]
            torn += found.count(None)
        except OSError as error:
            unreadable.append(f"{path.name}: {error.strerror}")
    events.sort(key=lambda event: float(event["t"]))
    return JournalContents(events=tuple(events), torn_lines=torn, unreadable_files=tuple(unreadable), read_to=read_to)


_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _lines_of(names: Collection[Event]) -> re.Pattern[bytes]:
    """Return what is found in the lines of these events, as `Journal.emit` writes them, and in no text of others."""
    return re.compile(f'"event":"(?:{"|".join(name.value for name in names)})","step":'.encode())


def parse_lines(data: bytes, unwanted: re.Pattern[bytes] | None = None) -> Iterator[dict[str, Any] | None]:
    """Yield the event of each line, None for one that cannot be read; lines with `unwanted` in them are passed over.

    `json.loads` guesses an encoding and looks for blanks, which takes as long as reading a line: a fleet has millions.
    """
    for line in data.splitlines():
        line = line.strip()
        if not line or (unwanted is not None and unwanted.search(line)):
            continue
        try:
            event, end = _scan(text := str(line, "utf-8", "surrogatepass"), 0)
        except (ValueError, RecursionError, StopIteration):
            yield None
            continue
        if end != len(text):
            yield None
            continue
        valid = isinstance(event, dict) and isinstance(event.get("event"), str) and _is_time(event.get("t"))
        yield event if valid else None


def _is_time(value: Any) -> bool:
    # JSON knows NaN and integers beyond any float; neither can be sorted among times.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def file_prefix(host: str) -> str:
    """Return how the names of a host's journal files begin; another host's may begin alike, the events tell."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host) + "-"
