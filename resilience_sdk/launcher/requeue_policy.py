"""The requeue policy.

A pure function of the runs so far says what `resilience supervise` does after the command ended.

A run is one start of the command, with all the restarts that a launcher inside it makes. The order of the rules
in `decide_next` is the contract: training that is complete beats everything, then what the user or the scheduler
asked for, then what another run cannot change, then the budget.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import attrs

from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.launcher.restart_policy import Decision, spent_words
from resilience_sdk.postmortem.exit_codes import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HARDWARE,
    EXIT_INTERRUPTED,
    EXIT_STOP,
    EXIT_USAGE,
    JobVerdict,
)

IDLE_STOPS = 3  # preemptions in a row that brought nothing: the machine is going, or somebody keeps asking
FREE_RUNS = 3  # of one supervision, that end for a hang which costs nothing of a budget
IDLE_BELOW_S = 60.0  # a longer run may have saved something that is not ours to see
_DELAY_CAP_S = 60.0
# What a shell and our launcher say when nothing was started: a typing mistake, no such file, not executable.
_NOT_STARTED = frozenset({EXIT_USAGE, 126, 127})
_BY_INTERRUPT = frozenset({EXIT_INTERRUPTED, -int(signal.SIGINT)})


@attrs.frozen
class RunEnd:
    """One ended run of the command. `code` is negative for a signal."""

    code: int
    lasted_s: float = 0.0
    finished: bool = False  # a finished flag is there
    stop_agreed: bool = False  # the ranks stopped at an agreed step
    asked_to_leave: bool = False  # we forwarded a signal of a scheduler or an operator
    interrupted: bool = False  # we forwarded one of a person at a terminal
    progressed: bool = False  # there is a checkpoint newer than all before
    began: bool = True  # something of the job was seen at work
    stood: str | None = None  # what stood still when somebody ended it, in words
    free: bool = False  # it ended for a hang that costs nothing of the budget
    refused_by: str | None = None  # the job that uses the run directory, where that kept the command out

    @property
    def preempted(self) -> bool:
        """Tell whether the command left because it was asked to, and may be run again."""
        return self.code == EXIT_PREEMPTED or (self.code == EXIT_FINISHED and self.stop_agreed)

    @property
    def failed(self) -> bool:
        """Tell whether the run counts against the budget."""
        return not self.preempted and self.code != EXIT_FINISHED

    @property
    def idle(self) -> bool:
        """Tell whether the run brought nothing as far as anybody can see."""
        return not self.progressed and self.lasted_s < IDLE_BELOW_S


def decide_next(history: Sequence[RunEnd], max_retries: int, first_delay_s: float) -> Decision:
    """Decide after the last run of `history` (oldest first, at least one).

    `first_delay_s` is the pause before the first retry; it doubles up to a minute, and is new after progress.
    """
    last = history[-1]
    failures = failures_since_progress(history)
    left = max(0, max_retries - failures)
    if ending := _wanted(last) or _preempted_for_nothing(history) or _hopeless(last):
        return attrs.evolve(ending, restarts_left=left)
    if last.preempted:
        idle = _idle_stops(history)
        return Decision(
            JobVerdict.RESTART,
            "it was preempted, which is no failure" + (f"; {_nothing_new(idle)}" if idle else ""),
            left,
            exit_code=EXIT_PREEMPTED,
            delay_s=_delay(idle, first_delay_s),
        )
    if failures > max_retries or not max_retries:
        spent = f"{spent_words(max_retries, 'job retry', 'job retries')} without a new checkpoint"
        none = "no retry of the job is allowed (--max-job-retries 0)"
        return Decision(JobVerdict.GIVE_UP, f"{how_it_ended(last)}; {spent if max_retries else none}")
    since = ", counted from the newest checkpoint" if any(end.progressed for end in history) else ""
    reason = f"{how_it_ended(last)}; job retry {failures} of {max_retries}{since}"
    if _is_free(history):
        reason = f"{how_it_ended(last)}; not counted: it hung at this place for the first time"
    return Decision(JobVerdict.RESTART, reason, left, delay_s=_delay(max(1, failures), first_delay_s))


def failures_since_progress(history: Sequence[RunEnd]) -> int:
    """Count the failed runs that count against the budget: those since the last new checkpoint."""
    failures, free = 0, 0
    for end in history:
        if end.progressed:
            failures = 0
        is_free = end.failed and end.free and free < FREE_RUNS
        free += is_free
        failures += end.failed and not is_free
    return failures


def _is_free(history: Sequence[RunEnd]) -> bool:
    last = history[-1]
    return last.failed and last.free and sum(end.failed and end.free for end in history) <= FREE_RUNS


def how_it_ended(end: RunEnd) -> str:
    """Return how the command ended, in words."""
    if end.code >= 0:
        return f"it left with {end.code}"
    try:
        return f"it was killed by {signal.Signals(-end.code).name}"
    except ValueError:
        return f"it was killed by signal {-end.code}"


def _wanted(last: RunEnd) -> Decision | None:
    if last.finished:
        return Decision(JobVerdict.FINISHED, "training is complete (the finished flag is set)")
    if last.interrupted or last.code in _BY_INTERRUPT:
        return Decision(JobVerdict.INTERRUPTED, "interrupted by the user")
    if last.asked_to_leave and last.stood is not None and last.code == EXIT_FAILED:
        return Decision(JobVerdict.GIVE_UP, f"{last.stood}; then the job was asked to leave: a retry of it counts")
    if last.asked_to_leave and last.code not in (EXIT_HARDWARE, EXIT_STOP):
        return Decision(JobVerdict.PREEMPTED, f"the job was asked to leave; {how_it_ended(last)}")
    if last.code == EXIT_FINISHED and not last.stop_agreed:
        return Decision(JobVerdict.FINISHED, "it left with 0, and no stop was agreed")
    return None


def _preempted_for_nothing(history: Sequence[RunEnd]) -> Decision | None:
    idle = _idle_stops(history)
    if idle < IDLE_STOPS:
        return None
    return Decision(JobVerdict.PREEMPTED, f"it was preempted, {_nothing_new(idle)}: not trying here any longer")


def _hopeless(last: RunEnd) -> Decision | None:
    if last.code == EXIT_STOP:
        return Decision(JobVerdict.STOP, f"the verdict is stop ({EXIT_STOP}): another run would fail in the same way")
    if last.code == EXIT_HARDWARE:
        reason = f"the verdict is hardware ({EXIT_HARDWARE}): requeue it elsewhere, not on this node"
        return Decision(JobVerdict.HARDWARE, reason)
    if last.refused_by is not None:
        return Decision(
            JobVerdict.STOP,
            f"the run directory is in use by job {last.refused_by}; name another one",
            exit_code=EXIT_USAGE,
        )
    if last.code in _NOT_STARTED and not last.began and last.idle:
        reason = f"it left with {last.code} before anything began: check the command line"
        return Decision(JobVerdict.STOP, reason, exit_code=EXIT_USAGE)
    return None


def _idle_stops(history: Sequence[RunEnd]) -> int:
    idle = 0
    for end in reversed(history):
        if not (end.preempted and end.idle):
            break
        idle += 1
    return idle


def _nothing_new(idle: int) -> str:
    times = "once" if idle == 1 else f"{idle} times in a row"
    return f"{times} within {IDLE_BELOW_S:.0f} s and without a new checkpoint"


def _delay(count: int, first_s: float) -> float:
    return min(_DELAY_CAP_S, first_s * 2.0 ** (count - 1)) if count else 0.0
