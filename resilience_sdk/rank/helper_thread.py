"""The helper thread of a rank: asleep on a pipe, it does what a hung training thread cannot.

It answers the monitor's requests (one byte each), keeps a monitor alive, corrects a provisional identity, and
turns completed collectives into progress where the loop itself gives none. It never touches the training
thread. While a C extension holds the GIL it cannot run; the monitor then reports just that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.recorder.page_layout import COLLECTIVES_EVERY_S
from resilience_sdk.system import linux
from resilience_sdk.system.kept_output import KeptOutput

REQUEST_FLIGHT_RECORD = b"f"
_WAKE = b"w"
_PERIOD_S = COLLECTIVES_EVERY_S
_MOST_FRAMES = 100  # of a thread, as in faulthandler
_End = tuple[int, tuple[int, int]]  # a descriptor, and what tells whether it is still the same file


class HelperThread:
    """Owns the rank's pipe and the thread that reads it."""

    def __init__(
        self,
        stem: Path | None,
        *,
        periodic: Callable[[], None],
        signalled: Callable[[bytes], None] = lambda _: None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the FIFO at `stem`.fifo; answers go to files beside it; `periodic()` runs about every 2 s.

        `signalled` gets what the pipe held: as the wakeup descriptor it receives the numbers of signals. Without
        `stem` there are no files, and nobody asks. `closed()` is called, on the thread, when the program has closed
        the pipe, which is then opened anew.

        Raises OSError when the FIFO cannot be made.
        """
        self._stem = stem
        self._requests: _End | None = None
        """A later pipe, for the monitor's requests: the file of the first one was removed."""
        self._closed: Callable[[], None] = closed
        self._periodic = periodic
        self._signalled = signalled
        self._stopping = False
        self.output: KeptOutput | None = None
        """The output of a rank that must not end for its reader, once there is a rank to say so."""
        if stem is not None:
            os.mkfifo(stem.with_suffix(".fifo"), 0o600)
        self._fd, self.descriptor = self._open()
        self._known = linux.identity(self._fd)
        self._thread = threading.Thread(target=self._serve, name="resilience-helper", daemon=True)

    def make_again(self) -> None:
        """Make the FIFO again whose file was removed, in the helper thread; signals still come by the old one.

        Raises OSError when it cannot be made.
        """
        if self._stem is None:
            return
        fifo = self._stem.with_suffix(".fifo")
        with contextlib.suppress(FileNotFoundError):
            fifo.unlink()
        os.mkfifo(fifo, 0o600)
        before = self._requests
        end = linux.aside(_open_fifo(fifo))
        self._requests = end, linux.identity(end)
        if before is not None and linux.is_still(*before):
            os.close(before[0])

    def start(self) -> None:
        """Start the thread; its first round of `periodic()` comes at once."""
        self._thread.start()

    def close(self, *, patience_s: float = 0.0) -> None:
        """End the thread at its next wake-up, which is now; waits for its end no longer than `patience_s` seconds.

        At the end of the process one should: a thread that comes back from a call of torch (`flight_record`) while
        the interpreter goes down aborts the process.
        """
        self._stopping = True
        with contextlib.suppress(OSError):
            if self._is_open():
                os.write(self.descriptor, _WAKE)
        if patience_s and self._thread.is_alive():
            self._thread.join(patience_s)

    def _open(self, number: int | None = None) -> tuple[int, int]:
        """Open the pipe and return its two ends, which are one of a FIFO; the second gets `number` if it is free."""
        if self._stem is None:
            reader, writer = os.pipe()
            for end in (reader, writer):
                os.set_blocking(end, False)
            return linux.aside(reader), linux.aside(writer, number)
        end = linux.aside(_open_fifo(self._stem.with_suffix(".fifo")), number)
        return end, end

    def _ends(self) -> list[_End]:
        """Return all ends that are read or written; those of a FIFO are one."""
        later = [self._requests] if self._requests is not None else []
        return [(self._fd, self._known), (self.descriptor, self._known), *later]

    def _is_open(self) -> bool:
        """Tell whether all ends are still our pipes: the program may have closed them, and opened others."""
        return all(linux.is_still(*end) for end in self._ends())

    def _reopen(self) -> bool:
        """Open the pipe anew, under the number that signals are written to; tell whether that could be done."""
        try:
            for fd, known in self._ends():
                if linux.is_still(fd, known):
                    os.close(fd)
            self._requests = None  # the file that is there now is the later one
            self._fd, self.descriptor = self._open(self.descriptor)
            self._known = linux.identity(self._fd)
        except OSError:
            return False
        with contextlib.suppress(Exception):
            self._closed()
        return True

    def _serve(self) -> None:
        while not self._stopping:
            with contextlib.suppress(Exception):  # the thread must outlive whatever a round meets
                self._periodic()
            if self._stopping:
                return
            if not self._is_open() and not self._reopen():
                time.sleep(_PERIOD_S)
                continue
            poll = select.poll()
            own = (self._fd, *([self._requests[0]] if self._requests else []))
            for fd in own:
                poll.register(fd, select.POLLIN)
            for fd in self.output.watched() if self.output is not None else ():
                poll.register(fd, 0)  # that nobody reads it any more is reported all the same
            for fd, _ in poll.poll(_PERIOD_S * 1000):
                if fd not in own:
                    self._keep_output()
                elif self._is_open():
                    self._answer_requests(fd)

    def _keep_output(self) -> None:
        try:
            if self.output is not None:
                self.output.look()
        except Exception:  # noqa: BLE001 - not again: the descriptor would be reported at once, for ever
            self.output = None

    def _answer_requests(self, fd: int) -> None:
        try:
            requests = os.read(fd, 4096)
        except OSError:  # nothing there, or it was closed this very moment
            return
        with contextlib.suppress(Exception):
            self._signalled(requests)
        if REQUEST_FLIGHT_RECORD in requests and self._stem is not None:
            with contextlib.suppress(Exception):  # no answer is an answer: the monitor says so
                write_whole(self._stem.with_suffix(".threads"), thread_stacks())
            with contextlib.suppress(Exception):  # last: it tells that all is there
                write_flight_record(self._stem.with_suffix(".fr.json"))


def _open_fifo(path: Path) -> int:
    """Open a FIFO for writing too, so that it never reports its end."""
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def thread_stacks() -> str:
    """Return the stacks of all threads but this one as `faulthandler` writes them, the main thread last.

    Beside the name of a thread that `threading` knows stands the kernel's number of it.
    Taken with the GIL held, so threads that run are no danger. A dump in a signal handler has no such
    protection: reading the frames of a thread that runs ends the process now and then.
    """
    names = {thread.ident: f"{thread.name}] [{thread.native_id}" for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    lines = []
    for ident in sorted(frames, key=lambda ident: ident == main):
        lines.append(f"Thread {ident:#018x} [{names.get(ident, '')}] (most recent call first):")
        frame: FrameType | None = frames[ident]
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            line = frame.f_lineno or "???"
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
            frame = frame.f_back
        lines.append("")
    return "\n".join(lines)


def write_flight_record(path: Path) -> None:
    """Write torch's flight recorder to `path` at once (rename); without torch.distributed an empty object."""
    write_whole(path, flight_record(everything=True) or "{}")


def flight_record(*, everything: bool) -> str | None:
    """Return the flight recorder as JSON (without `everything` only the status), or None where there is none.

    torch keeps one record per kind of device: gloo and MPI write one, NCCL another.
    """
    if "torch.distributed" not in sys.modules:
        return None
    native: Any = sys.modules.get("torch._C._distributed_c10d")
    records = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(native, name, None)
        if dump is not None:
            record = dump(everything, False)
            records.append(record.decode() if isinstance(record, bytes) else str(record))
    if len(records) < 2:
        return records[0] if records else None
    return json.dumps(merge_records(json.loads(records[0]), json.loads(records[1])))


def merge_records(record: dict[str, Any], nccl: dict[str, Any]) -> dict[str, Any]:
    """Return one record of both. Each numbers its groups from 0, so those of NCCL get names of their own."""
    entries = [
        {
            **entry,
            "pg_id": f"nccl-{entry.get('pg_id')}",
            "process_group": [f"{entry['process_group'][0]} (nccl)", *entry["process_group"][1:]],
        }
        for entry in nccl.get("entries", [])
        if entry.get("process_group")
    ]
    return {
        **record,
        "entries": [*record.get("entries", []), *entries],
        "pg_status": {
            **record.get("pg_status", {}),
            **{f"nccl-{group}": status for group, status in nccl.get("pg_status", {}).items()},
        },
        "pg_config": {
            **record.get("pg_config", {}),
            **{f"{group} (nccl)": about for group, about in nccl.get("pg_config", {}).items()},
        },
    }


def completed_collectives() -> int:
    """Return how many collectives this rank has completed, over all process groups."""
    try:
        status = json.loads(flight_record(everything=False) or "{}").get("pg_status", {})
        return sum(max(0, int(group.get("last_completed_collective", 0))) for group in status.values())
    except (ValueError, TypeError, AttributeError):
        return 0
