"""Ranks that are asked to leave: a last look at those which the signal ends at once, a second signal for the deaf.

A rank that handles the signal has the time that is left, and is looked at when that is over. One that does not is gone
within a millisecond, in the middle of whatever it does: where that is a save, only a look before the signal can tell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs

from resilience_sdk.core.console import say
from resilience_sdk.hang.evidence import parse_faulthandler
from resilience_sdk.hang.notices import innermost_of_user
from resilience_sdk.hang.saves import saving_frames
from resilience_sdk.monitor.evidence import FlightRequest, StackRequest
from resilience_sdk.monitor.ranks import open_target
from resilience_sdk.system.hostinfo import process_start_ticks
from resilience_sdk.system.procfs import has_signal, status_fields, written_files

if TYPE_CHECKING:
    from pathlib import Path

    from resilience_sdk.launcher.ranks import RankProcesses
    from resilience_sdk.recorder.page_reader import RankSnapshot

# The stop waits for these: threads that write down the stacks of a rank, and where one is silent, its signal handler.
_HELPER_S, _HANDLER_S = 0.15, 0.15
_POLL_S = 0.002
_LOOK_AGAIN_S = 2.0
_SAVE_PATIENCE_S = 1800.0
_MAX_UNANSWERED = 15  # looks: half a minute
_HEARD_S = 1.0  # for a handler of ours to note a signal, also while the main thread computes


def ends_by(pid: int, number: int) -> bool:
    """Tell whether a process neither handles nor ignores a signal; False where nobody can tell."""
    fields = status_fields(pid)
    known = "SigCgt" in fields and "SigIgn" in fields
    return known and not (has_signal(fields["SigCgt"], number) or has_signal(fields["SigIgn"], number))


@attrs.frozen
class LastLook:
    """What was seen of ranks a moment before they were ended."""

    ranks: tuple[int, ...] = ()
    stacks: Mapping[int, str] = attrs.field(factory=dict)
    """What each of them was in, as `faulthandler` writes it, where that could be had."""
    writing: Mapping[int, str] = attrs.field(factory=dict)
    """The file that each of them had open for writing, where that is one."""
    at_ns: int = attrs.field(factory=time.monotonic_ns)

    def writing_as_json(self) -> dict[str, str]:
        """Return the files by rank, as an event has them."""
        return {str(rank): path for rank, path in self.writing.items()}


def look_at(pids: Mapping[int, int], *, stem: Callable[[int, int], Path | None], dump_signal: int) -> LastLook:
    """Look at ranks that are about to be ended. `pids` by rank; `stem` of a rank's files by rank and pid.

    Never raises, and takes no longer than 0.4 s, for however many.
    """
    if not pids:
        return LastLook()
    before = {rank: written_files(pid) for rank, pid in pids.items()}
    stacks: dict[int, str] = {}
    with contextlib.suppress(OSError, ValueError):
        stacks = _stacks(pids, stem, dump_signal)
    after = {rank: written_files(pid) for rank, pid in pids.items()}
    found = {rank: the_written_one(before[rank], after[rank]) for rank in pids}
    return LastLook(tuple(sorted(pids)), stacks, {rank: path for rank, path in found.items() if path is not None})


def the_written_one(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Return the file that a process is writing, from two looks at what it has open; None where it may be several.

    One that grows, else the only one. Pure.
    """
    still = [path for path in after if path in before]
    grown = [path for path in still if after[path] > before[path]]
    chosen = grown or still
    return chosen[0] if len(chosen) == 1 else None


def _stacks(pids: Mapping[int, int], stem: Callable[[int, int], Path | None], dump_signal: int) -> dict[int, str]:
    with contextlib.ExitStack() as held:
        targets = {}
        for rank, pid in pids.items():
            place = stem(rank, pid)
            target = None if place is None else open_target(rank, pid, process_start_ticks(pid) or 0, place)
            if target is not None:
                held.callback(target.close)
                targets[rank] = target
        helpers = {rank: FlightRequest(target) for rank, target in targets.items()}
        found = _answers({r: one for r, one in helpers.items() if one.send() is None}, FlightRequest.stacks, _HELPER_S)
        handlers = {rank: StackRequest(target, dump_signal) for rank, target in targets.items() if rank not in found}
        asked = {rank: one for rank, one in handlers.items() if one.send() is None}
        return found | _answers(asked, StackRequest.poll, _HANDLER_S)


_Asked = TypeVar("_Asked", FlightRequest, StackRequest)


def _answers(asked: Mapping[int, _Asked], read: Callable[[_Asked], str | None], wait_s: float) -> dict[int, str]:
    """Return what ranks answer, by rank, as soon as all that live have, or the time is over."""
    found: dict[int, str] = {}
    until = time.monotonic() + wait_s
    while left := {rank: one for rank, one in asked.items() if rank not in found and one.target.alive}:
        for rank, one in left.items():
            if (text := read(one)) is not None:
                found[rank] = text
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return found


@attrs.define
class SecondSignal:
    """Sends SIGTERM to ranks of which the first signal is not heard, though the SDK waits for a request there.

    Such a rank has a use of its own for the signal: a handler in C, as of `faulthandler.register`, or of the script.
    That one has got it. A rank without a handler of ours for SIGTERM is left alone, it would die of it.
    """

    ranks: RankProcesses
    page: Callable[[int, int], RankSnapshot | None]
    """The page of a rank now, by rank and pid."""
    first: int
    note: Callable[[Sequence[int]], None] = lambda _: None
    """Called with the ranks, before they are signalled."""
    _since: float = attrs.field(factory=time.monotonic)
    _sent: set[int] = attrs.field(factory=set)

    def look(self) -> None:
        """Look which of the ranks that still run have not heard, and signal them; each once."""
        if self.first in (signal.SIGTERM, signal.SIGINT):
            return
        is_late = time.monotonic() - self._since >= _HEARD_S
        deaf = [rank for rank in self.ranks.running if rank not in self._sent and self._is_deaf(rank, is_late)]
        if not deaf:
            return
        self._sent.update(deaf)
        self.note(deaf)
        for rank in deaf:
            with contextlib.suppress(OSError):
                os.kill(self.ranks.pids[rank], signal.SIGTERM)

    def _is_deaf(self, rank: int, is_late: bool) -> bool:
        page = self.page(rank, self.ranks.pids[rank])
        if page is None or page.notice or signal.SIGTERM not in page.hears:
            return False
        return is_late or self.first not in page.hears


@attrs.define
class LateSaves:
    """Knows which ranks still save though their training is over: in a thread, at exit. Those are not ended.

    A save that is over counts for `grace_s` more, as its end does: a file may still be to be renamed, and the process
    has its time to end from there on. A rank that does not answer may save in code that lets nobody in.
    """

    look: Callable[[int], LastLook]
    """Looks at a rank."""
    grace_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    _saved_at: dict[int, float] = attrs.field(factory=dict)
    """When a rank was last seen in a save."""
    _unanswered: dict[int, int] = attrs.field(factory=dict)
    _look_at: dict[int, float] = attrs.field(factory=dict)

    def is_saving(self, rank: int, late_s: float) -> bool:
        """Tell whether a rank may be in a save, by a look every two seconds; one so late has stalled for good."""
        if late_s > _SAVE_PATIENCE_S:
            return False
        now = self.clock()
        if now >= self._look_at.get(rank, 0.0):
            self._look_at[rank] = now + _LOOK_AGAIN_S
            self._look(rank, now)
        if 0 < self._unanswered[rank] < _MAX_UNANSWERED:
            return True
        return rank in self._saved_at and now - self._saved_at[rank] <= self.grace_s

    def _look(self, rank: int, now: float) -> None:
        stacks = self.look(rank).stacks.get(rank)
        self._unanswered[rank] = 0 if stacks else self._unanswered.get(rank, 0) + 1
        frames = saving_frames(thread.frames for thread in parse_faulthandler(stacks or ""))
        if not frames:
            return
        if rank not in self._saved_at:
            place = (innermost_of_user(frames) or frames[0]).rpartition("/")[2].replace(" ", " in ", 1)
            say(f"rank {rank} has finished, and still saves at {place}: exit_timeout waits for that")
        self._saved_at[rank] = now
