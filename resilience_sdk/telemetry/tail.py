"""The tail of a journal while it is written, and the live pages beside it.

Of each file the whole lines, from where it was left, whatever becomes of it.

Files are known by inode, so that one that is renamed (rotated) is read to its end; one that was cut is read anew.
What stands behind the last newline is a line that is being written, or the torn last one of a writer that was
killed: it is left until a newline follows.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import job_config
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.journal import file_prefix, parse_lines
from resilience_sdk.core.plain_file import private, read_text
from resilience_sdk.recorder.page_directory import page_directories
from resilience_sdk.recorder.page_reader import PageReader, RankSnapshot
from resilience_sdk.system import hostinfo
from resilience_sdk.telemetry.metrics import FAMILIES, Sample

_CHUNK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 26
_SUFFIX = ".jsonl"
_SETTLING_S = 3.0


@attrs.frozen
class ReadMark:
    """How far a file was read: its name up to `.jsonl` (an inode may be used again) and the end of a line in it."""

    stem: str
    offset: int

    def is_behind(self, other: ReadMark) -> bool:
        """Tell whether this mark comes after `other` of the same file."""
        return other.stem == self.stem and self.offset > other.offset


Position = Mapping[int, ReadMark]
"""By inode: how far each file was read."""


@attrs.frozen
class Line:
    """One event, and where it stands."""

    event: Mapping[str, Any]
    mark: ReadMark
    """Behind the line."""
    is_new: bool
    """Whether it stands behind what was delivered before."""

    @property
    def id(self) -> str:
        """A name that this line has for ever, and no other line of the run."""
        return f"{self.mark.stem}:{self.mark.offset}"


class Follower:
    """Reads what one host's processes write into a journal directory. Not thread-safe."""

    def __init__(self, directory: Path, host: str, delivered: Position | None = None) -> None:
        """Follow the files of `host` in `directory` from their beginning; `delivered` tells which lines are new."""
        self._directory = directory
        self._host = host
        self._delivered = dict(delivered or {})
        self._changed_ns: int | None = None
        self._settled_at = 0.0
        self._paths: dict[int, Path] = {}
        self._position: dict[int, ReadMark] = {}
        self.torn = 0
        """Lines that could not be read so far."""

    @property
    def position(self) -> Position:
        """How far was delivered once the sink has taken everything that was read."""
        old = {
            inode: mark
            for inode, mark in self._delivered.items()
            if inode in self._paths and mark.is_behind(self._position.get(inode, ReadMark(mark.stem, -1)))
        }
        return {**{inode: mark for inode, mark in self._position.items() if inode in self._paths}, **old}

    def read(self) -> list[Line]:
        """Return the next lines of all files, as they were written; empty when there are none.

        At most 1 MiB (or a line) a file.

        Raises OSError when the directory cannot be read; files that vanish are passed over.
        """
        self._list()
        lines = [line for inode, path in list(self._paths.items()) for line in self._read_file(inode, path)]
        return _in_order(lines)

    def _list(self) -> None:
        """Look which files there are, where that may have changed: many nodes share a directory."""
        changed_ns = os.stat(self._directory).st_mtime_ns
        now = time.monotonic()
        if changed_ns != self._changed_ns:
            # Modification times are coarse: what comes just after a change may not change them again.
            self._changed_ns, self._settled_at = changed_ns, now + _SETTLING_S
        elif now > self._settled_at:
            return
        prefix = file_prefix(self._host)
        self._paths = {
            entry.inode(): Path(entry.path)
            for entry in sorted(os.scandir(self._directory), key=lambda entry: entry.name)
            if entry.name.startswith(prefix) and _SUFFIX in entry.name and entry.is_file(follow_symlinks=False)
        }

    def _read_file(self, inode: int, path: Path) -> Iterator[Line]:
        stem = path.name[: path.name.index(_SUFFIX) + len(_SUFFIX)]
        known = self._position.get(inode)
        offset = known.offset if known is not None and known.stem == stem else 0
        try:
            # Asked first, because it costs a network file system nothing: it is this host that writes.
            facts = os.stat(path, follow_symlinks=False)
            if known is not None and (facts.st_ino, facts.st_size) == (inode, offset):
                return
            with open(path, "rb", buffering=0, opener=private) as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != inode:
                    self._changed_ns = None  # another file has the name since it was listed
                    return
                delivered = self._delivered.get(inode)
                if delivered is not None and (delivered.stem != stem or facts.st_size < delivered.offset):
                    del self._delivered[inode]  # another file, or one that was cut
                    delivered = None
                if facts.st_size < offset:
                    offset = 0
                    self._delivered.pop(inode, None)
                    delivered = None
                data = _whole_lines(file.fileno(), offset, facts.st_size)
        except OSError:
            self._changed_ns = None
            return
        for raw in data.splitlines(keepends=True):
            offset += len(raw)
            for event in parse_lines(raw):
                if event is None:
                    self.torn += 1
                elif event.get("host") == self._host:
                    yield Line(event, ReadMark(stem, offset), delivered is None or offset > delivered.offset)
        self._position[inode] = ReadMark(stem, offset)


def _in_order(lines: list[Line]) -> list[Line]:
    """Sort what several writers have told by when they did, whatever was done to the wall clock meanwhile.

    The monotonic clock is the same for all processes of a host until it is booted again.
    """
    booted: dict[str, float] = {}
    for line in lines:
        boot, t = str(line.event.get("boot_id")), float(line.event["t"])
        booted[boot] = min(t, booted.get(boot, t))
    if all(isinstance(line.event.get("mono_ns"), int) for line in lines):
        return sorted(lines, key=lambda line: (booted[str(line.event.get("boot_id"))], line.event["mono_ns"]))
    return sorted(lines, key=lambda line: float(line.event["t"]))


def _whole_lines(fd: int, offset: int, size: int) -> bytes:
    """Return the next whole lines: a chunk of them, or one that is longer."""
    length = _CHUNK_BYTES
    while offset < size:
        data = os.pread(fd, length, offset)
        if (end := data.rfind(b"\n") + 1) or len(data) < length:
            return data[:end]
        if length >= _LONGEST_LINE_BYTES:
            return data  # no line of ours: passed over as a torn one
        length *= 4
    return b""


def save_position(path: Path, position: Position, extra: Mapping[str, Any]) -> None:
    """Write a position, with what else a sink has to remember; raises OSError."""
    files = {str(inode): [mark.stem, mark.offset] for inode, mark in position.items()}
    write_whole(path, json.dumps({"files": files, "extra": dict(extra)}))


def load_position(path: Path) -> tuple[Position, dict[str, Any]]:
    """Return what `save_position` wrote; from the beginning where nothing can be read, so that no line is lost."""
    try:
        data = json.loads(read_text(path))
        files = {int(inode): ReadMark(str(stem), int(offset)) for inode, (stem, offset) in data["files"].items()}
        extra = data["extra"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}, {}
    return files, extra if isinstance(extra, dict) else {}


_MONITOR_STATE = "monitor.json"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21  # of `hostinfo.stat_fields`


class Live:
    """Looks at the ranks of one run on this host, without a lock and without touching them."""

    def __init__(self, run_dir: Path, pages: Path | None, env: Mapping[str, str], *, since: float = 0.0) -> None:
        """Look into `pages`; where nobody told them, into those of this user's jobs that write into `run_dir`.

        The job runs `since` that Unix time, or a later one.
        """
        self._run_dir = os.path.realpath(run_dir)
        self._pages = pages
        self._env = env
        self._since = since
        self.up = True
        """Whether the job runs; who knows it sets it."""
        self.ended_in_order = True
        """False where the job did not end: its launcher was killed, or it goes on and only nobody looks any more."""

    def is_told_of(self, newest: float) -> bool:
        """Tell whether the job runs, and events up to the Unix time `newest` are of it: not of one before it."""
        return self.up and newest >= self._since

    def samples(self) -> Iterator[Sample]:
        """Return the values of this moment; never raises, what cannot be read is left out."""
        yield _sample("run.up", float(self.up or not self.ended_in_order))
        yield _sample("telemetry.timestamp", time.time())
        ranks = list(self.ranks()) if self.up else []
        yield _sample("ranks", float(len(ranks)))
        now_ns = time.monotonic_ns()
        for rank in ranks:
            name = str(rank.rank)
            yield _sample("rank.heartbeats", float(rank.beats), name)
            if rank.step is not None:
                yield _sample("rank.step", float(rank.step), name)
            if rank.main_lane.last_ns:
                yield _sample("rank.heartbeat_age", max(0, now_ns - rank.main_lane.last_ns) / 1e9, name)
        yield from _cost("telemetry", os.getpid())
        for pages in self._directories():
            if (monitor := _monitor_pid(pages)) is not None:
                yield from _cost("monitor", monitor)

    def ranks(self) -> Iterator[RankSnapshot]:
        """Return the pages of the ranks that live, newest attempt of each, by rank."""
        found: dict[int, RankSnapshot] = {}
        for pages in self._directories():
            for path in pages.glob("*.page"):
                # A page may vanish, be cut or be of another version at any moment.
                with contextlib.suppress(OSError, ValueError):
                    reader = PageReader(path)
                    try:
                        rank = reader.snapshot()
                    finally:
                        reader.close()
                    if rank is None or hostinfo.process_is_gone(rank.pid, rank.start_ticks):
                        continue
                    if rank.rank not in found or rank.attempt >= found[rank.rank].attempt:
                        found[rank.rank] = rank
        return iter(found[rank] for rank in sorted(found))

    def _directories(self) -> list[Path]:
        if self._pages is not None:
            return [self._pages]
        return [pages for pages in page_directories(self._env) if self._is_of_run(pages)]

    def _is_of_run(self, pages: Path) -> bool:
        config = job_config.read(pages)
        return config is not None and os.path.realpath(config.run_dir) == self._run_dir


def _monitor_pid(pages: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state: Any = json.loads(read_text(pages / _MONITOR_STATE))
        pid, ticks = int(state["pid"]), int(state["start_ticks"])
        return None if hostinfo.process_is_gone(pid, ticks) else pid
    return None


def _cost(process: str, pid: int) -> Iterator[Sample]:
    fields = hostinfo.stat_fields(pid)
    if len(fields) > _RESIDENT_PAGES:
        ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        yield _sample("process.cpu", ticks / _TICKS_PER_S, process)
        yield _sample("process.memory", float(int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES), process)


def _sample(name: str, value: float, *labels: str) -> Sample:
    return Sample(FAMILIES[name], labels, value)
