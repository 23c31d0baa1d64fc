"""Exit codes: the verdict on a job, and the code that its launcher leaves with because of it.

The codes are a contract with whoever starts jobs: schedulers, batch scripts, `resilience supervise`.
"""

from __future__ import annotations

from enum import Enum

from resilience_sdk import errors
from resilience_sdk.errors import EXIT_PREEMPTED

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HARDWARE = 76
EXIT_STOP = 77
EXIT_INTERRUPTED = errors.EXIT_INTERRUPTED


class JobVerdict(str, Enum):
    """How the job goes on. Values are what the journal and `outcome.json` show."""

    RESTART = "restart"
    FINISHED = "finished"
    PREEMPTED = "preempted"
    HARDWARE = "hardware"
    STOP = "stop"
    GIVE_UP = "give_up"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        """The code that a job with this verdict ends with; of one that goes on, where that fails."""
        return _CODES.get(self, EXIT_FAILED)


_CODES = {
    JobVerdict.FINISHED: EXIT_FINISHED,
    JobVerdict.PREEMPTED: EXIT_PREEMPTED,
    JobVerdict.HARDWARE: EXIT_HARDWARE,
    JobVerdict.STOP: EXIT_STOP,
    JobVerdict.INTERRUPTED: EXIT_INTERRUPTED,
}


def verdict_of(exit_code: int) -> JobVerdict:
    """Return the verdict of a job that has ended with this code."""
    return next((verdict for verdict, code in _CODES.items() if code == exit_code), JobVerdict.GIVE_UP)
