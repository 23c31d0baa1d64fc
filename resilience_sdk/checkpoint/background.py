"""The thread of a save in the background, and how the threads of all ranks meet without a collective.

Each rank's thread leaves a small file beside what it has written, and rank 0's waits for all of them before it commits.
Collectives would have to keep their order with those of the training, and would hang with a dead rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.checkpoint.failure import number_of
from resilience_sdk.core.plain_file import private, read_bytes
from resilience_sdk.system import hostinfo

# The others write at the same time and about as much; one that is silent for longer is taken for gone.
PATIENCE_S = 1800.0
_LOOK_AGAIN_S = 0.02
_LOOK_FOR_DEAD_S = 0.5
_RETRY_S = 0.5


class Background:
    """One save in flight on this rank. Made by the thread that trains; `work` runs in a daemon thread.

    `work(written)` returns the outcome of the save, and calls `written()` when this rank's part is on disk. Making
    one raises `RuntimeError` where no thread is to be had.
    """

    def __init__(self, step: int, work: Callable[[Callable[[], None]], dict[str, Any]]) -> None:
        self.step = step
        self.pid = os.getpid()
        self.outcome: dict[str, Any] | None = None
        self._work = work
        self._written = threading.Event()
        self._done = threading.Event()
        threading.Thread(target=self._run, name="resilience-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome = self._work(self._written.set)
        except BaseException as error:  # noqa: BLE001 - a failed save is survived; what DCP raises is no Exception
            self.outcome = {"error": f"{type(error).__name__}: {error}", "number": number_of(error)}
        finally:
            self._written.set()
            self._done.set()

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until this rank's part is on disk; tell whether it is."""
        return self._written.wait(timeout_s)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the save is committed or has failed; tell whether it has come so far."""
        return self._done.wait(timeout_s)


def leave_part(directory: Path, rank: int, part: dict[str, Any], patience_s: float = PATIENCE_S) -> None:
    """Tell rank 0 that this rank has written its part, or why it could not; never raises.

    Where even that cannot be written (a full disk), it is tried until rank 0 has given up or there is space.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            _write_part(directory, rank, part)
        except OSError as error:
            if not directory.exists() or time.monotonic() > deadline:
                return
            part = {"error": part["error"] or error.strerror, "number": part.get("number") or number_of(error)}
            time.sleep(_RETRY_S)
        else:
            return


def _write_part(directory: Path, rank: int, part: dict[str, Any]) -> None:
    path = _part_path(directory, rank)
    fresh = path.with_suffix(".new")
    with open(fresh, "w", opener=private) as file:
        json.dump(part, file)
    os.rename(fresh, path)


def own_process() -> list[Any]:
    """Return what tells this process from all others, as a JSON value: where its number counts, number and start."""
    pid = os.getpid()
    return [hostinfo.boot_id(), hostinfo.pid_namespace(), pid, hostinfo.process_start_ticks(pid)]


def _has_ended(process: Sequence[Any]) -> bool:
    """Tell whether that process is provably gone. Of one on another host, or in another container, nothing is known."""
    *place, pid, start_ticks = process
    return place == own_process()[:2] and all(place) and hostinfo.process_is_gone(pid, start_ticks)


class _Patience:
    """Ends a wait for other ranks: after a time, or as soon as one of them cannot answer any more."""

    def __init__(self, patience_s: float, processes: Sequence[Any]) -> None:
        self._deadline = time.monotonic() + patience_s
        self._processes = processes
        self._look_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._deadline

    def find_ended(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose processes have ended; looks twice a second."""
        if not self._processes or time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + _LOOK_FOR_DEAD_S
        return [rank for rank in ranks if _has_ended(self._processes[rank])]


def await_parts(
    directory: Path,
    own: dict[str, Any],
    ranks: int,
    patience_s: float = PATIENCE_S,
    processes: Sequence[Any] = (),
) -> list[Any]:
    """Return the parts of all ranks, on rank 0; `own` is its. An error of one of them ends the wait.

    A rank that says nothing for `patience_s`, or that has ended without a word, has a part that says so. `processes`
    are those of the ranks (see `own_process`); without them nobody is known to have ended.
    """
    parts: list[Any] = [own, *[None] * (ranks - 1)]
    patience = _Patience(patience_s, processes)
    while True:
        missing = [rank for rank, part in enumerate(parts) if part is None]
        ended = patience.find_ended(missing)  # before reading: what it left behind is there by now
        for rank in missing:
            parts[rank] = _take_part(directory, rank)
            if parts[rank] is None and rank in ended:
                parts[rank] = {"error": "has ended before it had written its part"}
        missing = [rank for rank in missing if parts[rank] is None]
        failed = any(part is not None and part["error"] for part in parts)
        if missing and (failed or patience.is_over):
            silence = {"error": f"has not written its part within {patience_s:.0f} s"}
            return [part if part is not None else ({"error": None} if failed else silence) for part in parts]
        if not missing:
            return parts
        time.sleep(_LOOK_AGAIN_S)


def _take_part(directory: Path, rank: int) -> Any:
    """Return what a rank has left, and remove it; None while there is nothing."""
    path = _part_path(directory, rank)
    try:
        part = json.loads(read_bytes(path))
    except (OSError, ValueError):
        return None  # not there yet; a rename makes it appear as a whole
    path.unlink(missing_ok=True)
    return part


def await_close(
    directory: Path, target: Path, patience_s: float = PATIENCE_S, processes: Sequence[Any] = ()
) -> dict[str, Any]:
    """Wait on another rank until rank 0 has committed or given up; return the outcome as far as it can be seen.

    Not longer than rank 0 lives, as far as that can be told (`processes` as in `await_parts`).
    """
    patience = _Patience(patience_s, processes)
    while not (patience.find_ended([0]) or patience.is_over) and directory.exists():
        time.sleep(_LOOK_AGAIN_S)
    return {"error": None if (target / "manifest.json").exists() else "rank 0 has not committed it"}


def _part_path(directory: Path, rank: int) -> Path:
    return directory / f".part-{rank:05d}"
