"""One sink and its thread: read, translate, send, remember how far, and try again for ever.

Sinks share nothing, so that one that is slow, dead or stuck delays no other. Nothing waits in memory: what a sink has
not taken stands in the journal, and its position file says from where.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.errors import MissingExtraError
from resilience_sdk.telemetry.sinks.base import Sink
from resilience_sdk.telemetry.tail import Follower, load_position, save_position

_POLL_S = 1.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FINISHING_PAUSE_S = 0.2
_LONGEST_FINISHING_PAUSE_S = 2.0  # many nodes end at once, perhaps before a receiver that is asked too often
STUCK_S = 120.0
"""More than any sink waits by its design: one that needs longer has not failed, and does not answer either."""


class Worker:
    """Serves one sink until it is told to finish, or lacks its library.

    `note_failure` and `note_recovery` are called on its thread.
    """

    def __init__(
        self,
        sink: Sink,
        journal: Path,
        *,
        note_failure: Callable[[str, Exception], None],
        note_recovery: Callable[[str, float], None],
        first_pause_s: float = _FIRST_PAUSE_S,
        poll_s: float = _POLL_S,
    ) -> None:
        """Serve `sink` with the journal directory `journal`, from where an earlier exporter has left it.

        The journal is looked at every `poll_s` seconds; after a failure `first_pause_s` pass, then twice that, and on.
        """
        self.sink = sink
        self.lacks_library = False
        """Whether it has given up, since what the sink is written with cannot be imported."""
        self._note_failure, self._note_recovery = note_failure, note_recovery
        self._first_pause_s, self._poll_s = first_pause_s, poll_s
        self._wake = threading.Event()
        self._finishing = False
        self._delivered = threading.Event()
        self._turn_began: float | None = None
        self._told_end = False
        self._told_unsaved = False
        self._has_sent = False
        self._items: deque[Any] = deque()
        self._torn = 0
        self._refreshed_at = float("-inf")
        self._failing_since: float | None = None
        delivered, sink.memory = load_position(self._file)
        self._saved = (delivered, dict(sink.memory))
        self._follower = Follower(journal, sink.place.host, delivered)
        # Never waited for by the interpreter: a library may hang in it.
        self._thread = threading.Thread(target=self._run, name=f"resilience-sink-{sink.name}", daemon=True)

    @property
    def _file(self) -> Path:
        return self.sink.place.state_dir / f"{self.sink.name}.json"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """Ask for what is left to be delivered, and for the end; returns at once."""
        self._finishing = True
        self.sink.note_end()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until all was delivered, at most so long; tell whether it was."""
        return self._delivered.wait(timeout_s)

    def is_being_fetched(self) -> bool:
        """Tell whether the sink has taken everything, and stays for those who have yet to fetch the end from it."""
        return self._delivered.is_set() and self._thread.is_alive()

    def is_stuck(self) -> bool:
        """Tell whether the sink has not come back for so long that it will not by itself. Any thread."""
        began = self._turn_began
        return began is not None and time.monotonic() - began > STUCK_S

    # -- the thread

    def _run(self) -> None:
        pause_s, is_open, in_haste = self._first_pause_s, False, False
        while True:
            self._turn_began = time.monotonic()
            try:
                if not is_open:
                    self.sink.open()
                    is_open = True
                is_over = self._finishing  # asked before the reading: what is read then is all there is
                more = self._turn(is_over=is_over)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told and tried again
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
                    self._note_failure(self.sink.name, error)
                if isinstance(error, MissingExtraError):
                    self.lacks_library = True
                    self._delivered.set()  # this process will not find it later: nobody need wait
                    return
                if self._finishing and self.sink.is_fetched and not is_open:
                    self._delivered.set()  # who was to come for it cannot, and will not any more
                    return
                if is_open:  # what is broken may come again when it is opened anew
                    is_open = False
                    self._close()
                self._turn_began = None
                self._refreshed_at = float("-inf")
                self._wake.wait(pause_s)
                self._wake.clear()
                if self._finishing and not in_haste:
                    in_haste, pause_s = True, _FINISHING_PAUSE_S
                else:
                    longest_s = _LONGEST_FINISHING_PAUSE_S if self._finishing else _LONGEST_PAUSE_S
                    pause_s = min(2 * pause_s, longest_s)
                continue
            self._turn_began = None
            if not more:  # so it was refreshed, too: to take items is not yet to be well, it may have laid them aside
                pause_s = self._first_pause_s
                if self._failing_since is not None:
                    self._note_recovery(self.sink.name, time.monotonic() - self._failing_since)
                    self._failing_since = None
                if is_over:
                    break
                self._wake.wait(self._poll_s)
        while not self._remember():  # the sink stays open meanwhile: somebody may be about to fetch the end from it
            time.sleep(_FINISHING_PAUSE_S)
        self._delivered.set()
        with contextlib.suppress(Exception):
            self.sink.stay_until_fetched()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self.sink.close()

    def _turn(self, *, is_over: bool) -> bool:
        """Deliver what is new; tell whether there may be more at once."""
        more = self._take() if not self._items else True
        if is_over and not more and not self._told_end:
            self._told_end = True
            self._items.extend(self.sink.finish())
        self._deliver()
        now = time.monotonic()
        if not more and (is_over or now - self._refreshed_at >= self.sink.place.interval_s):
            self.sink.refresh()
            self._refreshed_at = now
        return more

    def _take(self) -> bool:
        """Read what comes next and translate it: once, however often it has to be sent."""
        lines = self._follower.read()
        for line in lines:
            try:
                items: Sequence[Any] = self.sink.digest(line)
            except Exception as error:  # noqa: BLE001 - one line that is not understood must not cost the others
                self._note_failure(self.sink.name, error)
                continue
            if line.is_new:
                self._items.extend(items)
        torn = self._follower.torn
        self.sink.note_torn(torn - self._torn)
        self._torn = torn
        return bool(lines)

    def _deliver(self) -> None:
        if self._items:
            self._has_sent = True
            self.sink.send(self._items)
            assert not self._items, f"{self.sink.name} left items without an error"
        self._remember()

    def _remember(self) -> bool:
        """Write how far this sink has come, where that is news; tell whether the next exporter sends nothing again."""
        now = (self._follower.position, dict(self.sink.memory))
        if now != self._saved:
            try:
                save_position(self._file, *now)
            except OSError as error:
                # Served all the same: a full disk is when people look at metrics. Told once, tried at every turn.
                if not self._told_unsaved:
                    self._told_unsaved = True
                    self._note_failure(f"position of {self.sink.name}", error)
                return not self._has_sent and now[1] == self._saved[1]
            self._saved = now
        return True
