"""Reasons of a stop: who asked the job to leave, in words, as far as signals and the order of events tell. Pure.

Ranks and monitors write them, `account` reads them; so this loads nothing.

A handler in Python is not told who has sent a signal. But a launcher tells all of its ranks, within a moment, and who
asked first is not who ended a job that could not stop then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.settings.parse import signal_name
from resilience_sdk.incidents import compact_ranks
from resilience_sdk.recorder import page_layout as at

IN_VAIN = "no stop was agreed in time"
"""`why` of the event `degraded` of a job that goes on, because its time to leave is over and nobody has left."""


class Asker(str, Enum):
    """Who asks: `kind` of the event `preempt_notice`."""

    SIGNAL = "signal"
    FILE = "file"
    REQUEST = "request"
    END = "end"
    CLOUD = "cloud"
    STRAGGLER = "straggler"
    PLANNED = "planned"


_ASKERS = {at.NOTICE_REQUEST: Asker.REQUEST, at.NOTICE_END: Asker.END, at.NOTICE_FILE: Asker.FILE}


def asker(notice: int) -> Asker:
    """Return who asks, from the notice on a rank's page, which is a signal's number or one of `NOTICE_NAMES`."""
    return _ASKERS.get(notice, Asker.SIGNAL)


def notice_name(notice: int) -> str:
    """Return the same in words, such as `SIGTERM`; a page may hold any number."""
    try:
        return at.NOTICE_NAMES.get(notice) or signal_name(notice)
    except ValueError:
        return f"signal {notice}"


class Hindrance(str, Enum):
    """Why no stop can be agreed: `hindrance` of the event `degraded`, whose `ranks` says about whom."""

    NO_CHECK = "no_check"
    LATE = "late"
    ENDED = "ended"
    UNSEEN = "unseen"
    UNEVEN = "uneven"
    CUT_OFF = "cut_off"

    @property
    def told(self) -> str:
        """What is the matter, to be read after `rank 3`."""
        return _WORDS[self][0]

    @property
    def cure(self) -> str:
        """What to change; `{ranks}` stands for whom."""
        return _WORDS[self][1]


_WORDS = {
    Hindrance.NO_CHECK: (
        "never calls preemption.check()",
        "call preemption.check() in the loop of {ranks}, once per step as on all ranks",
    ),
    Hindrance.LATE: (
        "did not call preemption.check() again",
        "call preemption.check() more often in {ranks}, or raise preempt_time",
    ),
    Hindrance.ENDED: ("has ended before the others", "end all ranks after equally many steps"),
    Hindrance.UNSEEN: (
        "is seen by no monitor",
        "wait until it has started, or start the job by `resilience run`",
    ),
    Hindrance.UNEVEN: (
        "calls preemption.check() more or less often than others",
        "call preemption.check() once per step on every rank",
    ),
    Hindrance.CUT_OFF: (
        "could not reach the others",
        "look at the network and at the process that held the store",
    ),
}


PLANNED_EXIT = "planned_exit"
"""The cause of an end that nobody asked for: the training leaves as it was told to when it was started."""
_CAUSES = {
    Asker.SIGNAL: "preemption_sigterm",
    Asker.FILE: "preemption_requested",
    Asker.REQUEST: "preemption_requested",
    Asker.END: "slurm_time_limit",
    Asker.CLOUD: "preemption_notice",
    Asker.STRAGGLER: "straggler_persistent",
    Asker.PLANNED: PLANNED_EXIT,
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
    at: float | None = None
    """When the first of them asked (Unix seconds); None where nobody is known to have asked."""


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
    at = notices[first].get("t") if notices else None
    return Askers(asked, in_vain, cause, float(at) if isinstance(at, (int, float)) else None)


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
    if kind is Asker.PLANNED:
        return f"{source} itself, as planned{reason}"
    if kind is Asker.END:
        return "the scheduler, whose time for the job ends"
    return f"{source}{reason}" if kind is Asker.STRAGGLER else f"the cloud ({source}{reason})"


def whole(value: object) -> int | None:
    """Return a whole number as it is, None for anything else that a journal may hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
