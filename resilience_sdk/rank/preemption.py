"""The session's part in a preemption: what it gives to the agreed stop, with a page and without one."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from resilience_sdk.core import console, environ
from resilience_sdk.core.journal import CURVES, EventSink, journal_sizes, read_journal
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.parse import signal_number
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.incidents import count_words
from resilience_sdk.preemption import listener as preemption
from resilience_sdk.preemption.agreement import make_link, read_link
from resilience_sdk.preemption.context import (
    MONITOR,
    NO_PAGES,
    RANKS,
    NoJournal,
    PreemptionContext,
    coordinator_word,
)
from resilience_sdk.preemption.reasons import who_asked
from resilience_sdk.rank.helper_thread import HelperThread
from resilience_sdk.rank.identity import fallback_job_key, find_identity, is_alone, rank_journal
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_directory import parse_stem
from resilience_sdk.recorder.page_writer import ControlWords
from resilience_sdk.system import hostinfo

_ELASTIC_GRACE_S = 30.0  # torchrun ends its ranks by SIGKILL so long after it has passed a signal on
_MONITOR_COMES_S = 10.0
_MOST_JOURNAL_BYTES = 16 << 20  # more than that a rank does not read in its grace


def signal_numbers(settings: Settings) -> tuple[int, ...]:
    """Return the numbers of `preempt_signals`."""
    return tuple(signal_number(name) for name in settings.preempt_signals)


def signal_grace_s(env: Mapping[str, str]) -> float:
    """Return how long ranks live after a signal, as far as who sends it has a time of its own."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in env and environ.INTERNAL_JOB not in env
    return _ELASTIC_GRACE_S if is_torchrun else math.inf


class Coordination:
    """Who coordinates the stop of this job, alike on all its ranks: monitors, or the ranks themselves.

    Our launcher carries what the monitors of several nodes tell one another, others do not. On one node it depends on
    whether a monitor can be started: the first rank that knows decides for all of them, in the page directory. One that
    is about to come has some seconds from the first question on. Nothing here waits. Any thread.
    """

    def __init__(
        self,
        pages: Path,
        attempt: int,
        env: Mapping[str, str],
        has_monitor: Callable[[], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages` are those of this node; `has_monitor` returns None as long as a monitor may still come."""
        self._pages = pages
        self._attempt = attempt
        self._several_nodes = environ.has_several_nodes(env)
        self._ours = environ.INTERNAL_JOB in env
        self._has_monitor = has_monitor
        self._clock = clock
        self._deadline: float | None = None
        self._stood: dict[str, str] = {}  # what this rank has gone by, by the name of the link

    def make_again(self) -> None:
        """Write down again what this rank goes by, where the page directory was removed. Raises OSError."""
        for name, value in list(self._stood.items()):
            make_link(self._pages / name, value)

    def by_monitor(self) -> bool | None:
        """Tell whether monitors coordinate; None as long as nobody knows."""
        if self._several_nodes:
            return self._ours
        word = coordinator_word(self._pages, self._attempt)
        try:
            if (decided := read_link(word)) is None:
                if self._deadline is None:
                    self._deadline = self._clock() + _MONITOR_COMES_S
                found = self._has_monitor()
                if found is None and self._clock() < self._deadline:
                    return None
                make_link(word, MONITOR if found else RANKS)
                decided = read_link(word)
        except OSError:
            return True
        if decided is not None:
            self._stood[word.name] = decided
        return decided == MONITOR

    def first_check(self, count: int) -> int:
        """Return from which check on ranks agree by themselves, alike on all of them; `count` is this rank's now.

        Ranks learn at different checks that no monitor coordinates. Each publishes its count before it looks, so who
        reads the counts after that was decided finds no less than any rank had before it knew. And no rank that knows
        leaves its check before this number stands. So none has gone beyond it.
        """
        if self._several_nodes:
            return count
        word = coordinator_word(self._pages, self._attempt)
        word = word.with_name(f"{word.name}-first")
        try:
            if (first := read_link(word)) is None:
                make_link(word, str(1 + max([count, *_published_checks(self._pages, self._attempt)])))
                first = read_link(word)
        except OSError:
            return count
        if first is not None:
            self._stood[word.name] = first
        return count if first is None else int(first)


def knows_no_monitor(pages: Path, attempt: int) -> bool:
    """Tell whether a rank of this node has found that none can be started. Any thread."""
    try:
        return read_link(coordinator_word(pages, attempt)) == RANKS
    except OSError:
        return False


class StopTeller:
    """Says at the agreed stop who has asked for it, where no launcher of ours does.

    The monitor's account comes when the ranks are gone, and by then a script around them may have printed its log.
    """

    def __init__(self, journal: Path, attempt: int, env: Mapping[str, str], is_speaker: Callable[[], bool]) -> None:
        """Read `journal`, the run directory's, from here on; `is_speaker` tells whether this rank speaks for all."""
        self._journal = journal
        self._attempt = attempt
        self._is_ours = environ.INTERNAL_JOB in env
        self._is_speaker = is_speaker
        self._read_to = {} if self._is_ours else journal_sizes(journal)

    def __call__(self, step: int | None, heard: str | None) -> None:
        """Say it after so many steps; `heard` is the signal that this rank has got. Never raises."""
        if self._is_ours or not self._is_speaker():
            return
        who = heard
        with contextlib.suppress(Exception):  # told or not, the stop goes on
            new = journal_sizes(self._journal)
            if sum(size - self._read_to.get(name, 0) for name, size in new.items()) < _MOST_JOURNAL_BYTES:
                told = read_journal(self._journal, since=self._read_to, without=CURVES).events
                asked = who_asked([event for event in told if event.get("attempt") == self._attempt]).asked
                who = asked[0] if asked else heard
        by = f" by {who}" if who else ""
        after = f" after {count_words(step)}" if isinstance(step, int) else ""
        console.say(f"the job is asked to leave{by}: all ranks stop{after}")


def listen_without_page(settings: Settings, env: Mapping[str, str], *, is_agreed: bool = False) -> None:
    """Let `preemption.check()` work in a process that can have no page: the ranks then agree among themselves.

    In a job of our launcher with several nodes it cannot, unless that is agreed: on the other nodes monitors
    coordinate.
    """
    if not is_agreed and environ.INTERNAL_JOB in env and environ.has_several_nodes(env):
        return
    identity = find_identity(env)
    run_dir = env.get(environ.RUN_DIR) or settings.run_dir
    preemption.listen(
        PreemptionContext(
            words=memoryview(bytearray(8 * at.LANES_AT)).cast("Q"),
            pages=NO_PAGES,
            journal=_journal(run_dir, settings, env, identity.rank),
            attempt=environ.attempt(env),
            signals=signal_numbers(settings),
            grace_s=settings.preempt_time,
            wakeup=_start_helper,
            signal_grace_s=signal_grace_s(env),
            request_file=Path(run_dir) / "preempt" if run_dir else None,
            began_unix=time.time(),
            is_alone=has_no_peers(identity.world_size, identity.provisional, env),
            has_coordinator=lambda: False,
        )
    )


def _journal(run_dir: str | None, settings: Settings, env: Mapping[str, str], rank: int) -> EventSink:
    """Return the journal in which who waits for this job finds its stop; none in a directory of another job."""
    if run_dir:
        job = environ.job_key(env, fallback_job_key(env))
        with contextlib.suppress(RunDirectoryError, OSError):
            place = RunDirectory.create(run_dir, group_readable=settings.group_readable)
            holder = current_holder(place)
            if holder is None or holder.job == job:
                return rank_journal(place, job, environ.attempt(env), rank)
    return NoJournal()


def has_no_peers(world_size: int, provisional: bool, env: Mapping[str, str]) -> bool:
    """Tell whether a process is a job of its own, as far as can be known before there is a process group."""
    return is_alone(env) if provisional else world_size == 1


def signalled(numbers: bytes) -> None:
    """Take what the wakeup descriptor received, in the helper thread."""
    handlers = preemption.handlers()
    if handlers is not None:
        handlers.see(numbers)


def _published_checks(pages: Path, attempt: int) -> Iterator[int]:
    """Yield how often each living rank of this node has called `check()`."""
    for path in pages.glob(f"a{attempt}-r*.page"):
        stem = parse_stem(path.stem)
        if stem is None or hostinfo.process_is_gone(stem[2], None):
            continue
        with contextlib.suppress(OSError, ValueError):
            words = ControlWords(path)
            yield words.checks
            words.close()


def _start_helper() -> int:
    pid = os.getpid()

    def look() -> None:
        if os.getpid() == pid:
            preemption.look()

    helper = HelperThread(None, periodic=look, signalled=signalled)
    helper.start()
    return helper.descriptor
