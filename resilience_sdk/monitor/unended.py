"""Watch over ranks whose training is over and whose processes do not end: a notice, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import console
from resilience_sdk.core.console import printable
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.evidence import main_frames, parse_faulthandler
from resilience_sdk.hang.unended import Held, HeldThread, holder
from resilience_sdk.incidents.stalls import EXIT
from resilience_sdk.monitor.activity import child_pids
from resilience_sdk.monitor.evidence import collect_evidence
from resilience_sdk.monitor.ranks import WatchedRank

_NOTICE_PART = 1 / 6  # of `stuck_after`, as for a job without progress: 10 s by default
_SUFFIX = ".held.json"
_WRITTEN_S = 4.0
_MAX_BYTES = 1 << 18
_MAX_COMMAND = 100
_MAX_FRAMES = 32
_TRACKER = "multiprocessing.resource_tracker"  # ends with its parent, which does not wait for it


@attrs.define
class _Ending:
    """One rank process that should have ended."""

    since_ns: int
    next_s: float


class UnendedWatch:
    """Notices ranks that do not end. The monitor's only thread; one attempt's at a time."""

    def __init__(self, settings: Settings, journal: Journal, may_ask: Callable[[], bool]) -> None:
        """Tell of each rank after the usual time of a notice, and again each time that has doubled."""
        self._settings = settings
        self._journal = journal
        self._may_ask = may_ask
        self._after_s = _NOTICE_PART * settings.stuck_after
        self._endings: dict[int, _Ending] = {}

    def look(self, ranks: Sequence[WatchedRank], now_ns: int) -> None:
        """Look which ranks should have ended by now, and tell of those that are due."""
        for watched in ranks:
            pid = watched.snapshot.pid
            since_ns = _since_ns(watched, now_ns) if watched.alive else None
            if since_ns is None:
                self._endings.pop(pid, None)
                continue
            ending = self._endings.setdefault(pid, _Ending(since_ns, self._after_s))
            for_s = (now_ns - ending.since_ns) / 1e9
            # The rank itself knows best, and writes it down within seconds.
            waits = watched.snapshot.exit_state == "running" and for_s < ending.next_s + _WRITTEN_S
            if for_s >= ending.next_s and not (waits and _told(watched.stem) is None):
                ending.next_s = 2 * for_s
                self._tell(watched, for_s)

    def _tell(self, watched: WatchedRank, for_s: float) -> None:
        page = watched.snapshot
        held = self._held(watched)
        what = _what_is_over(watched)
        text = f"rank {watched.rank} has not ended {for_s:.0f} s after {what}: {holder(held)}"
        limit_s = self._settings.exit_timeout
        if page.done and page.destroying_ns is None:
            text += "" if limit_s is not None else "; nothing is lost (exit_timeout would end such a process)"
        self._journal.emit(
            Event.STALL,
            kind=EXIT,
            since=time.time() - for_s,
            for_s=for_s,
            ranks=[{"rank": watched.rank, "node": None, "frame": None, "stack": list(held.main[:_MAX_FRAMES])}],
            waiting=[],
            verdict_in_s=None,
            rule=EXIT,
            text=text,
        )
        console.say(text)

    def _held(self, watched: WatchedRank) -> Held:
        pid = watched.snapshot.pid
        children = {child: command_of(child) for child in child_pids(pid)}
        children = {child: command for child, command in children.items() if _TRACKER not in command}
        if watched.snapshot.exit_state == "running" and (told := _told(watched.stem)) is not None:
            return attrs.evolve(told, children=children)
        # The helper thread has ended with the interpreter: only a handler of signals may still answer.
        stacks = None
        if watched.target is not None:
            found = collect_evidence(
                [watched.target],
                dump_signal=self._settings.dump_signal,
                grace_s=self._settings.dump_grace,
                may_ask=self._may_ask,
            )
            stacks = found[watched.rank].stacks if watched.rank in found else None
        main = main_frames(parse_faulthandler(stacks)) if stacks else ()
        told = _told(watched.stem) if watched.snapshot.exit_state == "error" else None
        return Held(main, told.threads if told is not None else (), children, is_known=bool(main) or not stacks)


def _since_ns(watched: WatchedRank, now_ns: int) -> int | None:
    """Return since when a rank should have ended; None where it need not."""
    page = watched.snapshot
    if page.exit_state != "running":
        return page.over_ns or now_ns
    if page.is_over:
        return page.over_ns
    return page.destroying_ns


def _what_is_over(watched: WatchedRank) -> str:
    page = watched.snapshot
    if page.exit_state == "error":
        return "it failed"
    if page.over_ns is None and page.destroying_ns is not None:
        return "it began to destroy the process group"
    return "its training was done" if page.done else "its main thread has ended"


def _told(stem: Path) -> Held | None:
    """Return what the rank itself has written; a file that does not parse counts as missing."""
    try:
        with open_to_read(f"{stem}{_SUFFIX}") as file:
            data: Mapping[str, Any] = json.loads(file.read(_MAX_BYTES))
        threads = tuple(HeldThread(str(one["name"]), _texts(one["frames"])) for one in data["threads"])
        return Held(_texts(data["main"]), threads)
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None


def _texts(items: Any) -> tuple[str, ...]:
    return tuple(printable(one) for one in items if isinstance(one, str)) if isinstance(items, list) else ()


def command_of(pid: int) -> str:
    """Return the command line of a process as it may be shown, `?` where it is not to be seen."""
    words: list[str] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read(_MAX_BYTES).split(b"\0") if word]
    text = " ".join(printable(" ".join(redact_argv(words))).split())
    return (text if len(text) <= _MAX_COMMAND else f"{text[:_MAX_COMMAND]}...") or "?"
