"""The words in which the journal tells who asks a job to leave, and which ranks hinder its stop.

Ranks and monitors write them, `account` reads them; so this loads nothing.
"""

from __future__ import annotations

from enum import Enum

from resilience_sdk.rank_page import layout as at
from resilience_sdk.settings.parse import signal_name

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
