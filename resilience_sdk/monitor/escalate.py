"""The end of stuck ranks: SIGTERM, a grace, SIGKILL, and a look whether they are gone. It always finishes.

Signals go through pidfds only, so never to a process that got the number of a dead rank. Each is journalled,
and before each the caller is asked whether this monitor is still the one in charge.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Sequence

import attrs

from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.procfs import status_fields
from resilience_sdk.monitor.targets import Target

_NS_PER_S = 1_000_000_000
_KILL_GRACE_S = 5.0


@attrs.frozen
class Escalation:
    """How it ended: ranks that are gone, ranks still there, and whether another monitor took over."""

    ended: tuple[int, ...]
    survivors: tuple[int, ...]
    broken_off: bool


def end_ranks(
    targets: Sequence[Target],
    *,
    term_grace_s: float,
    reason: str,
    journal: Journal,
    in_charge: Callable[[], bool],
    kill_grace_s: float = _KILL_GRACE_S,
) -> Escalation:
    """End the ranks in the given order and return what became of them; takes at most both graces.

    Args:
        targets: The ranks to end, those to be signalled first (the culprits) in front.
        term_grace_s: How long they may take after SIGTERM, all together (`Settings.term_grace`).
        reason: Journalled beside every signal.
        journal: Gets a `signal_sent` event per signal.
        in_charge: Asked before every signal; once it says no, nothing more is sent.
        kill_grace_s: How long to look on after SIGKILL. A rank in uninterruptible sleep survives it.
    """
    waiting = list(targets)
    for number, grace_s in ((signal.SIGTERM, term_grace_s), (signal.SIGKILL, kill_grace_s)):
        for target in waiting:
            if not target.alive:
                continue
            if not in_charge():
                return _outcome(targets, broken_off=True)
            _send(target, number, reason, journal)
        waiting = _wait(waiting, grace_s, in_charge)
        if not waiting:
            break
    return _outcome(targets, broken_off=False)


def _send(target: Target, number: signal.Signals, reason: str, journal: Journal) -> None:
    """Send one signal. A stopped process is then continued, because it would not see SIGTERM before.

    In this order: the pending SIGTERM is the first thing that a continued process meets, not its own code.
    """
    stopped = status_fields(target.pid).get("State", "")[:1] in ("T", "t")
    numbers = [number, signal.SIGCONT] if stopped and number == signal.SIGTERM else [number]
    for each in numbers:
        error = None
        try:
            if not target.send(each):
                return
        except OSError as failure:
            error = failure.strerror
        journal.emit(
            Event.SIGNAL_SENT,
            rank=target.rank,
            pid=target.pid,
            signal=each.name,
            reason=reason,
            error=error,
        )


def _wait(targets: Sequence[Target], grace_s: float, in_charge: Callable[[], bool]) -> list[Target]:
    """Return the targets that are still there after the grace, or as soon as none is.

    Returns early, too, when another monitor has taken over; the caller notices before its next signal.
    """
    end_ns = time.monotonic_ns() + int(grace_s * _NS_PER_S)
    remaining = [target for target in targets if target.alive]
    poller = select.poll()
    for target in remaining:
        if target.pidfd >= 0:
            poller.register(target.pidfd, select.POLLIN)
    longest_ms = 250.0 if all(target.pidfd >= 0 for target in remaining) else 20.0
    while remaining and in_charge():
        left_ms = (end_ns - time.monotonic_ns()) / 1_000_000
        if left_ms <= 0:
            break
        for pidfd, _ in poller.poll(min(left_ms, longest_ms)):
            poller.unregister(pidfd)
        remaining = [target for target in remaining if target.alive]
    return remaining


def _outcome(targets: Sequence[Target], *, broken_off: bool) -> Escalation:
    survivors = tuple(target.rank for target in targets if target.alive)
    ended = tuple(target.rank for target in targets if target.rank not in survivors)
    return Escalation(ended, survivors, broken_off)
