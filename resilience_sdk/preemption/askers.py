"""Who asked a job to leave, in words, as far as signals and the order of events tell. Pure.

A handler in Python is not told who has sent a signal. But a launcher tells all of its ranks, within a moment, and who
asked first is not who ended a job that could not stop then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.events import Event
from resilience_sdk.incidents import compact_ranks
from resilience_sdk.preemption.asking import IN_VAIN, Asker

_CAUSES = {
    Asker.SIGNAL: "preemption_sigterm",
    Asker.FILE: "preemption_requested",
    Asker.REQUEST: "preemption_requested",
    Asker.END: "slurm_time_limit",
    Asker.CLOUD: "preemption_notice",
    Asker.STRAGGLER: "straggler_persistent",
}
# What the key of a job says of whoever started its ranks, where that is not our launcher, which tells itself.
_LAUNCHERS = {"elastic-": "torchrun", "slurm-": "Slurm"}

Notice = Mapping[str, Any]


@attrs.frozen
class Askers:
    """Who asked one attempt to leave, in words, in the order of time."""

    asked: tuple[str, ...]
    """Those because of whom it left; empty: nobody is known to have asked."""
    in_vain: tuple[str, ...]
    """Those before them, for whom no stop could be agreed."""
    cause: str
    """The cause in the taxonomy."""


def who_asked(told: Sequence[Notice]) -> Askers:
    """Tell who asked, from an attempt's events by time.

    A job that was asked in vain and goes on is ended by whoever asks after that. And a request ends nobody: where no
    stop was agreed, the signal that came after it did.
    """
    notices = [event for event in told if event["event"] == Event.PREEMPT_NOTICE.value]
    stops = [event for event in told if event["event"] == Event.STOP_AGREED.value]
    first = _first_that_counts(told, notices, is_agreed=bool(stops))
    asked = tuple(dict.fromkeys(_told_once(notices[first:], stops)))
    in_vain = tuple(who for who in dict.fromkeys(_told_once(notices[:first], stops)) if who not in asked)
    cause = _CAUSES[_asker(notices[first])] if notices else _CAUSES[Asker.SIGNAL]
    return Askers(asked, in_vain, cause)


def _first_that_counts(told: Sequence[Notice], notices: Sequence[Notice], *, is_agreed: bool) -> int:
    """Return the place of the first notice because of which the job left."""
    before = 0
    seen = 0
    for event in told:
        seen += event["event"] == Event.PREEMPT_NOTICE.value
        if event["event"] == Event.DEGRADED.value and event.get("why") == IN_VAIN and seen < len(notices):
            before = seen
    if is_agreed:
        return before
    signals = (at for at, notice in enumerate(notices) if at >= before and _asker(notice) is Asker.SIGNAL)
    return next(signals, before)


def _asker(notice: Notice) -> Asker:
    kind = notice.get("kind")
    return next((one for one in Asker if one.value == kind), Asker.SIGNAL)  # what else there is, is of another version


def _told_once(notices: Sequence[Notice], stops: Sequence[Notice]) -> Iterator[str]:
    """Yield who asked, without what only repeats it: a monitor reports what a rank or launcher has told."""
    to_launcher = any(_asker(notice) is Asker.SIGNAL and notice.get("rank") is None for notice in notices)
    with_reason = {whole(notice.get("rank")) for notice in notices if "reason" in notice}
    for notice in notices:
        kind, rank = _asker(notice), whole(notice.get("rank"))
        if kind is Asker.SIGNAL and rank is not None:
            if not to_launcher:  # else the launcher has passed it on
                yield _signalled(notice, rank, notices, stops)
        elif kind is not Asker.REQUEST or "reason" in notice or rank not in with_reason:
            yield _words(kind, notice)


def _signalled(notice: Notice, rank: int, notices: Sequence[Notice], stops: Sequence[Notice]) -> str:
    """Tell of a signal that a rank got: which ranks of its host had it at the stop tells who may have sent it."""
    host = notice.get("host")
    name = str(notice.get("source")).removeprefix(f"rank {rank}: ")
    here = [stop for stop in stops if stop.get("host") == host and whole(stop.get("rank")) is not None]
    ranks = {stop["rank"] for stop in here}
    heard = {stop["rank"] for stop in here if stop.get("heard")} | {
        other
        for one in notices
        if _asker(one) is Asker.SIGNAL and one.get("host") == host and (other := whole(one.get("rank"))) is not None
    }
    launcher = next((who for key, who in _LAUNCHERS.items() if str(notice.get("job")).startswith(key)), None)
    place = f" on {host}" if host else ""
    if len(ranks) > 1 and ranks <= heard:
        return f"{name} to all {len(ranks)} ranks{place}" + (f", as {launcher} passes it on" if launcher else "")
    if len(heard) > 1:
        return f"{name} to ranks {compact_ranks(heard)}{place}"
    if len(ranks) > 1:
        return f"{name} to rank {rank}{place} alone" + (f", so not by {launcher}" if launcher else "")
    return f"{name} to rank {rank}{place}" + (f", by {launcher} or somebody else" if launcher else "")


def _words(kind: Asker, notice: Notice) -> str:
    host, rank, by = notice.get("host"), whole(notice.get("rank")), notice.get("by")
    source = str(notice.get("source")).removeprefix(f"rank {rank}: ")
    reason = f": {notice['reason']}" if notice.get("reason") else ""
    here = f" on {host}" if host else ""
    if kind is Asker.SIGNAL:
        return f"{source} to the launcher{here}"
    if kind is Asker.REQUEST:
        return "preemption.request()" + (f" in rank {rank}{here}" if rank is not None else here) + reason
    if kind is Asker.FILE:
        return f"resilience preempt of {by}{reason}" if by else f"the file preempt in the run directory{reason}"
    if kind is Asker.END:
        return "the scheduler, whose time for the job ends"
    return f"{source}{reason}" if kind is Asker.STRAGGLER else f"the cloud ({source}{reason})"


def whole(value: object) -> int | None:
    """Return a whole number as it is, None for anything else that a journal may hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
