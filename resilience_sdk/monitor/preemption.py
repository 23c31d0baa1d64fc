"""The coordinator of a stop: the monitor hears that the job should leave, and has all ranks of the node agree."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilience_sdk import console
from resilience_sdk.errors import ConfigError
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.preemption import cell
from resilience_sdk.preemption import protocol as agreement
from resilience_sdk.preemption.protocol import CoordinatorMove, Decision, Proposal, RankView
from resilience_sdk.rank_page import ControlWords
from resilience_sdk.rank_page import layout as at

if TYPE_CHECKING:
    from resilience_sdk.preemption.cloud import Notice

_POLL_S = 0.005  # while a stop is being agreed
_SILENT_S = 5.0  # after which a rank without a check is named
_RATE_S = 1.0  # over which the rate of checks is measured


def watch_cloud(cloud: str, endpoint: str | None) -> Callable[[], Notice | None]:
    """Begin to ask a cloud for notices, in a thread, unless it is `off`; return what tells the one that stands."""
    if cloud == "off":
        return lambda: None
    from resilience_sdk.preemption.cloud import cloud_poller  # late: it loads an HTTP client
    from resilience_sdk.preemption.cloud_watch import CloudWatch

    try:
        poller = cloud_poller(cloud, endpoint)
    except ConfigError as error:
        console.say_once("cloud", f"no notices of the cloud: {error}")
        return lambda: None
    if poller is None:
        return lambda: None
    watch = CloudWatch(poller)
    return lambda: watch.notice


class StopCoordinator:
    """Looks for notices and runs the rounds of `preemption.protocol`. The monitor's only thread."""

    def __init__(
        self,
        pages: Path,
        run_dir: Path,
        journal: Journal,
        *,
        grace_s: float,
        began: float | None,
        cloud: Callable[[], Notice | None],
    ) -> None:
        """Decide in `pages`; `run_dir/preempt` counts if it is newer than `began` (Unix seconds)."""
        self._cloud = cloud
        self._pages = pages
        self._file = run_dir / "preempt"
        self._journal = journal
        self._grace_s = grace_s
        self._began = time.time() if began is None else began
        self._words: dict[Path, ControlWords] = {}
        self._attempt: int | None = None
        self._noted_s: float | None = None
        self._deadline_ns: int | None = None
        self._round = 0
        self._lead = 0
        self._open: Proposal | None = None
        self._over = False
        self._last: tuple[float, int] | None = None
        self._rate = 0.0

    def look(self, attempt: int | None, ranks: Sequence[WatchedRank], world_size: int, failed: bool) -> float | None:
        """Look once; return how soon to look again, None = no haste. `failed`: a rank has died of its own."""
        if attempt is None or not ranks:
            return None
        if attempt != self._attempt:
            self._begin(attempt)
        pages = {watched.rank: words for watched in ranks if (words := self._map(watched)) is not None}
        self._measure(pages)
        if self._noted_s is None and (found := self._source(pages)) is not None:
            self._note(*found, pages)
        if self._noted_s is None or self._over:
            return None
        if failed:
            self._over = True
            # A rank that left after the agreed stop may look like one that failed; the others must still stop there.
            if not self._is_agreed():
                for words in pages.values():
                    words.propose(agreement.TEARDOWN)
            return None
        if len(pages) < world_size or any(not watched.alive for watched in ranks) or not self._all_check(pages):
            return None
        return self._negotiate(pages)

    def _begin(self, attempt: int) -> None:
        for words in self._words.values():
            words.close()
        self._words.clear()
        self._attempt = attempt
        self._noted_s = self._deadline_ns = self._open = self._last = None
        self._over, self._rate, self._lead = False, 0.0, 0
        self._round = cell.last_round(self._pages, attempt)

    def _map(self, watched: WatchedRank) -> ControlWords | None:
        path = watched.stem.with_name(watched.stem.name + ".page")
        if path not in self._words:
            try:
                self._words[path] = words = ControlWords(path)
            except OSError:
                return None
            shown = agreement.unpack(words.control)  # by the monitor before this one
            self._round = max(self._round, shown.round if shown is not None else 0)
            if self._deadline_ns is not None:
                words.set_deadline(self._deadline_ns)  # a rank that starts later than the others has no more time
        return self._words[path]

    def _measure(self, pages: dict[int, ControlWords]) -> None:
        now, most = time.monotonic(), max((words.checks for words in pages.values()), default=0)
        if self._last is None:
            self._last = now, most
        elif now - self._last[0] >= _RATE_S:
            self._rate = (most - self._last[1]) / (now - self._last[0])
            self._last = now, most

    def _source(self, pages: dict[int, ControlWords]) -> tuple[str, float | None] | None:
        """Return who asks, and when it happens (Unix seconds) where that was told."""
        for rank, words in pages.items():
            if number := words.notice:
                return f"rank {rank}: {_name(number)}", None
        with contextlib.suppress(OSError):
            info = self._file.lstat()
            trusted = stat.S_ISREG(info.st_mode) and info.st_uid in (0, os.geteuid())
            if trusted and info.st_mtime >= self._began:
                return self._file.name, None
        notice = self._cloud()
        return None if notice is None else (f"{notice.source}: {notice.reason}", notice.deadline_unix)

    def _note(self, source: str, end: float | None, pages: dict[int, ControlWords]) -> None:
        self._noted_s = time.monotonic()
        left_s = self._grace_s if end is None else max(0.0, end - time.time())
        deadline_ns = int((self._noted_s + left_s) * 1e9)
        # A monitor that takes over puts nothing off.
        deadline_ns = min((words.deadline for words in pages.values() if words.deadline), default=deadline_ns)
        left_s = max(0.0, deadline_ns / 1e9 - self._noted_s)
        self._deadline_ns = deadline_ns
        for words in pages.values():
            words.set_deadline(deadline_ns)
        self._journal.emit(Event.PREEMPT_NOTICE, source=source, time_left_s=left_s)
        self._lead = agreement.first_lead(self._rate)

    def _all_check(self, pages: dict[int, ControlWords]) -> bool:
        """Tell whether every rank calls `check()`; name those that do not, once."""
        silent = sorted(rank for rank, words in pages.items() if not words.checks)
        if silent and len(silent) < len(pages) and time.monotonic() - (self._noted_s or 0.0) > _SILENT_S:
            told = f"rank {', '.join(map(str, silent[:8]))} never calls preemption.check(), so no stop can be agreed"
            if console.say_once("check", f"{told}; call it on every rank, once per step"):
                self._journal.emit(Event.DEGRADED, what="preemption", why="ranks without check()", ranks=silent)
        return not silent

    def _is_agreed(self) -> bool:
        """Close the newest round, by whichever monitor, and tell whether it was a stop."""
        decision = cell.decide(self._pages, self._attempt or 0, self._round, Decision.VOID) if self._round else None
        return decision is Decision.COMMIT

    def _negotiate(self, pages: dict[int, ControlWords]) -> float | None:
        attempt = self._attempt or 0
        if self._open is None and self._is_agreed():  # by the monitor before this one
            self._over = True
            return None
        views = [RankView(words.checks, words.acknowledged) for words in pages.values()]
        decision = cell.read_decision(self._pages, attempt, self._open.round) if self._open is not None else None
        move = agreement.coordinator_move(self._open, decision, views)
        if move is CoordinatorMove.PROPOSE:
            self._lead = agreement.next_lead(self._lead) if self._open is not None else self._lead
            self._open = agreement.next_proposal(self._round, [view.count for view in views], self._lead)
            if self._open is None:
                self._over = True
                return None
            self._round = self._open.round
            for words in pages.values():
                words.propose(agreement.pack(self._open))
        elif self._open is not None and move in (CoordinatorMove.COMMIT, CoordinatorMove.VOID):
            wanted = Decision.COMMIT if move is CoordinatorMove.COMMIT else Decision.VOID
            cell.decide(self._pages, attempt, self._open.round, wanted)
        elif move is CoordinatorMove.STOPPED:
            self._over = True
            return None
        return _POLL_S


def _name(number: int) -> str:
    if number == at.NOTICE_REQUEST:
        return "preemption.request()"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
