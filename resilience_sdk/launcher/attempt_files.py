"""The launcher's files in the job's page directory, kept there whoever removes it.

The directory is private to this user; still, what ranks wrote there is distrusted: a file that does not parse
counts as missing. Nothing here raises for a file that is gone or a disk that is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.events import Event
from resilience_sdk.core.job_config import FILE, JobConfig
from resilience_sdk.core.journal import Journal
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.monitor.pending_exceptions import read_thread_exception
from resilience_sdk.postmortem.facts import RankTrace
from resilience_sdk.rank.exceptions import frames_in, user_frame
from resilience_sdk.recorder import page_directory
from resilience_sdk.recorder.page_directory import make_again, make_private, page_stem, parse_stem
from resilience_sdk.recorder.page_reader import PageReader, RankSnapshot
from resilience_sdk.system.hostinfo import process_start_ticks

_MOST_BYTES = 1 << 20


class AttemptFiles:
    """Writes and reads one page directory. Without one (no place for it) everything is a no-op."""

    def __init__(self, directory: Path | None, config: JobConfig | None = None) -> None:
        """Use the job's page directory, or none; with `config` it is made again where somebody removes it."""
        self.directory = directory
        self._config = config
        self._written: dict[str, str] = {}
        self._lock = threading.RLock()

    def keep(self) -> bool:
        """Make again what was removed of the directory and the launcher's files in it; tell whether this did it.

        Any thread. Raises OSError where the directory cannot be made.
        """
        if self.directory is None or self._config is None:
            return False
        with self._lock:
            if not self._written or all(os.path.exists(self.directory / name) for name in (*self._written, FILE)):
                return False
            make_private(self.directory)
            for name, text in self._written.items():
                if not (self.directory / name).exists():
                    write_whole(self.directory / name, text)
            return make_again(self.directory, self._config)  # last: then a monitor may come

    def write_launcher(self, **facts: Any) -> None:
        """Say that this launcher is in charge."""
        pid = os.getpid()
        self._write("launcher.json", {"pid": pid, "start_ticks": process_start_ticks(pid), **facts})

    def write_attempt(self, attempt: int, ranks: Sequence[int], world_size: int, **node: Any) -> None:
        """Announce an attempt and its ranks on this node, before they start; `node`: number, name and count."""
        facts = {"attempt": attempt, "started_ns": time.monotonic_ns(), "ranks": list(ranks)}
        self._write(f"attempt-{attempt}.json", {**facts, "world_size": world_size, **node})

    def write_ending(self, attempt: int, reason: str) -> None:
        """Say, before any signal is sent, that the launcher ends what dies from now on; the first wins."""
        if self.directory is not None and not (self.directory / f"ending-{attempt}.json").exists():
            facts = {"attempt": attempt, "reason": reason, "at_ns": time.monotonic_ns()}
            self._write(f"ending-{attempt}.json", facts)

    def write_over(self) -> None:
        """Say that no attempt will follow: the monitor may go."""
        self._write("over.json", {"at_ns": time.monotonic_ns()})

    def write_settings(self, settings: Mapping[str, Any]) -> Path | None:
        """Write the effective settings for the ranks and return the file."""
        return self._write("settings.json", settings)

    def hang_verdict(self, attempt: int) -> Mapping[str, Any] | None:
        """Return the monitor's verdict that the deaths of this attempt are the end of a hang."""
        if self.directory is None:
            return None
        verdict = _read_json(self.directory / f"verdict-{attempt}.json")
        return verdict if verdict is not None and verdict.get("kind") == "hang" else None

    def last_step(self, attempt: int, rank: int, pid: int, *, is_finished: bool) -> dict[str, Any]:
        """Return the step that this rank process was in, or its last; nothing when its page does not say."""
        if self.directory is None:
            return {}
        snapshot = _snapshot(self.directory / (page_stem(attempt, rank, pid) + ".page"))
        if snapshot is None or snapshot.step is None:
            return {}
        step = snapshot.last_step if is_finished else snapshot.step
        return {"step": step, "step_is_global": snapshot.step_is_global}

    def script_exit_code(self, attempt: int, rank: int, pid: int) -> int | None:
        """Return what the script of a rank process has left with, by the rank's own word; None where it had not."""
        if self.directory is None:
            return None
        snapshot = _snapshot(self.directory / (page_stem(attempt, rank, pid) + ".page"))
        return None if snapshot is None else snapshot.script_exit_code

    def traces(self, attempt: int, pids: Mapping[int, int]) -> dict[int, RankTrace]:
        """Return what each of these rank processes left, by rank."""
        traces = {}
        for rank, pid in pids.items():
            stem = None if self.directory is None else self.directory / page_stem(attempt, rank, pid)
            if stem is None:
                traces[rank] = RankTrace(rank, pid, None, None, None, None)
                continue
            error_file = stem.with_name(stem.name + ".error.json")
            exception = _read_json(error_file)
            traces[rank] = RankTrace(
                rank,
                pid,
                _snapshot(stem.with_name(stem.name + ".page")),
                exception,
                written_ns(error_file) if exception is not None else None,
                _text(stem.with_name(stem.name + ".stack")),
                read_thread_exception(stem),
            )
        return traces

    def remove_attempt(self, attempt: int) -> None:
        """Remove the page files of an ended attempt; their content has been taken."""
        with self._lock:
            for name in (f"attempt-{attempt}.json", f"ending-{attempt}.json"):
                self._written.pop(name, None)
        for path, found in self._rank_files():
            if found[0] == attempt:
                _unlink(path)

    def remove_all(self) -> None:
        """Remove the directory at the end of the job."""
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                _unlink(path)
            self.directory.rmdir()

    def _rank_files(self) -> Iterator[tuple[Path, tuple[int, int, int]]]:
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            for path in list(self.directory.iterdir()):
                found = parse_stem(path.name.partition(".")[0])
                if found is not None:
                    yield path, found

    def _write(self, name: str, facts: Mapping[str, Any]) -> Path | None:
        if self.directory is None:
            return None
        path, text = self.directory / name, json.dumps(facts)
        try:
            with self._lock:
                if self._config is not None and not self.directory.is_dir():
                    make_private(self.directory)
                write_whole(path, text)
                self._written[name] = text
        except OSError as error:
            say_once(f"write:{name}", f"cannot write {path} ({error.strerror}); the ranks run unwatched")
            return None
        return path


def exception_from_torch(path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Return an exception record made from the error file of torch's `@record`, or None.

    What is left when the SDK is disabled in the ranks. Torch writes secrets as they were said; the record has none.
    """
    data = _read_json(Path(path)) if path else None
    message = data.get("message") if data else None
    if not isinstance(message, Mapping):
        return None
    text = redact_text(str(message.get("message", "")))
    extra = message.get("extraInfo")
    callstack = redact_text(str(extra.get("py_callstack", ""))) if isinstance(extra, Mapping) else ""
    kind, colon, rest = text.partition(": ")
    known = colon and kind.replace(".", "").isidentifier()
    return {
        "type": kind if known else "Exception",
        "message": rest if known else text,
        "frames": [f"{file}:{line} {name}" for file, line, name in frames_in(callstack)],
        "user_frame": user_frame(frames_in(callstack)),
        "step": None,
        "traceback": callstack or None,
    }


def written_ns(path: Path) -> int | None:
    """Return when a file was written, on this host's monotonic clock."""
    try:
        age_ns = time.time_ns() - path.stat().st_mtime_ns
    except OSError:
        return None
    return time.monotonic_ns() - max(0, age_ns)


def _snapshot(path: Path) -> RankSnapshot | None:
    try:
        reader = PageReader(path)
    except OSError:
        return None
    try:
        return reader.snapshot()
    except Exception as error:  # noqa: BLE001 - what a rank wrote must not end its launcher
        say_once("page", f"a rank page cannot be decoded ({type(error).__name__}: {error})")
        return None
    finally:
        reader.close()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace") or None
    except OSError:
        return None


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


_LOOK_EVERY_S = 0.5


class PageKeeper:
    """A thread that looks twice a second: the main one may wait for minutes, for ranks that save and leave."""

    def __init__(self, files: AttemptFiles, journal: Journal) -> None:
        """Keep the directory of `files` from now on; with none there is nothing to do."""
        self._files = files
        self._journal = journal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="resilience-pages", daemon=True)
        if files.directory is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, before the directory is removed by its owner."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Look once, and tell what was lost."""
        pages = self._files.directory
        if pages is None:
            return
        try:
            if self._files.keep():
                self._tell(page_directory.LOST, page_directory.words_of_loss(pages))
        except OSError as error:
            self._tell("no " + page_directory.LOST, page_directory.words_of_failure(pages, error))

    def _keep(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look()

    def _tell(self, key: str, words: str) -> None:
        if say_once(key, words):
            self._journal.emit(Event.DEGRADED, what="pages", why=words)
