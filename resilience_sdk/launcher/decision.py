"""What to do after an attempt ended: a pure function of the attempts so far.

Nothing here reads a clock, a file or the environment, so the rules are tested as rules. The order of the
rules in `decide` is the contract: what the user asked for (stop, preemption) beats what went wrong, and what
cannot get better by trying again beats the restart budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.attribution.resource import Resource
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.outcome import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HARDWARE,
    EXIT_INTERRUPTED,
    EXIT_STOP,
    Verdict,
)

STARTUP_FAILURES = 3  # attempts in a row without one completed step: the program does not get going
CAUSE_RETRIES = 3  # of any cause: the third goes on from an older checkpoint, as two failures soon after a resume tell
SURE = 0.8  # confidence from which a verdict may end the job: for hardware, for the scheduler, for a spent budget
_WAIT_FIRST_S = 5.0
_WAIT_CAP_S = 60.0
# Causes outside the program: the same message twice does not make them the program's fault.
_OUTSIDE = frozenset({"network", "storage", "hardware", "host", "scheduler"})


class EndedBy(str, Enum):
    """Who ended an attempt."""

    RANKS = "ranks"  # they exited, or one of them died
    HANG = "hang"  # the monitor ended it after a confirmed hang
    PREEMPTION = "preemption"  # the launcher was told to leave (SIGTERM and kin)
    INTERRUPT = "interrupt"  # Ctrl-C
    MEMBERSHIP = "membership"  # a node joined: no fault, and not counted


@attrs.frozen
class KnownError:
    """What makes the uncaught exceptions of two attempts the same error: equal values.

    `message` has what differs between two runs of one bug taken out (see `attribution.fingerprint`);
    `step` is None unless steps are global.
    """

    type: str
    message: str
    user_frame: str | None
    step: int | None = None


@attrs.frozen
class AttemptEnd:
    """One ended attempt, as far as the decision needs it. Exit codes are by rank; a signal is negative."""

    attempt: int
    ended_by: EndedBy
    exit_codes: Mapping[int, int] = attrs.field(factory=dict)
    error: KnownError | None = None  # of the culprit, never of a victim
    category: str = "unknown"
    cause: str = "unknown"
    action: str = "restart"
    confidence: float = 0.0
    completed_a_step: bool | None = None  # None: the ranks gave no sign of progress that could tell
    checkpoint_before: int | None = None  # newest valid step when the attempt began
    checkpoint_after: int | None = None  # and when it ended
    stop_agreed: bool = False
    straggler: str | None = None  # who was so slow that the job asked itself to stop
    straggler_is_here: bool = True  # on this node, as the others decide by themselves
    spare_nodes: int = 0  # how many the job can do without
    holds_store: bool = False  # this node has the store of the rendezvous, without which no other can go on
    leaving: str | None = None  # who asked the job to leave, and what came of it, in one sentence
    all_done: bool = False  # every rank said that its training is over
    resource: Resource | None = None  # what has to work again before another attempt makes sense

    @property
    def made_checkpoint(self) -> bool:
        """Tell whether a new checkpoint was completed during this attempt."""
        return self.checkpoint_after is not None and (
            self.checkpoint_before is None or self.checkpoint_after > self.checkpoint_before
        )


@attrs.frozen
class Decision:
    """What happens now, after an attempt or (`supervise_rules`) after a run of the whole command.

    `reason` is one plain sentence for people, without a full stop; `exit_code` holds where it ends; `restarts_left` are
    those of the budget that was asked; `delay_s` is the pause before the next one, in seconds; `waits_for` is what
    then has to work. `others_go_on`: it ends here alone, the job goes on without this node;
    `elsewhere`: another node has ended the job, and has written why.
    """

    verdict: Verdict
    exit_code: int
    reason: str
    restarts_left: int
    delay_s: float = 0.0
    waits_for: Resource | None = None
    others_go_on: bool = False
    elsewhere: bool = False

    @property
    def restarts(self) -> bool:
        """Tell whether another attempt, or run, is made."""
        return self.verdict is Verdict.RESTART

    @property
    def ends_the_job(self) -> bool:
        """Tell whether the other nodes have to end because of it: not where all finish, and not where they go on."""
        return self.verdict is not Verdict.FINISHED and not self.others_go_on

    def to_event(self) -> dict[str, Any]:
        """Return the fields of the journal's `decision` event."""
        return {
            "verdict": self.verdict.value,
            "exit_code": None if self.restarts else self.exit_code,
            "reason": self.reason,
            "restarts_left": self.restarts_left,
            "delay_s": self.delay_s,
            "waits_for": None if self.waits_for is None else str(self.waits_for),
            "others_go_on": self.others_go_on,
        }


def decide(history: Sequence[AttemptEnd], max_restarts: int) -> Decision:
    """Decide after the last attempt of `history` (oldest first, at least one) ended."""
    last = history[-1]
    left = max(0, max_restarts - failures_since_progress(history))
    if _stopped_for_straggler(last) and not last.straggler_is_here and last.spare_nodes:
        # No fault of ours, and there are no more such restarts than nodes: it costs nothing of the budget.
        return Decision(Verdict.RESTART, EXIT_FAILED, "going on without the slow node", left)
    ending = _wanted_ending(last) or _good_ending(last)
    if ending is None:
        ending = _hopeless(history)
    if ending is not None:
        verdict, code, reason = ending
        alone = verdict is Verdict.HARDWARE and last.spare_nodes > 0
        if alone and last.holds_store:
            reason += "; the others cannot go on, because it has the store of the rendezvous"
        return Decision(verdict, code, reason, left, others_go_on=alone and not last.holds_store)
    failures = failures_since_progress(history)
    if failures > max_restarts:
        spent = f"all {max_restarts} restarts are spent without a new checkpoint"
        none = "no restart is allowed (--max-restarts 0)"
        return Decision(Verdict.GIVE_UP, EXIT_FAILED, spent if max_restarts else none, 0)
    since = ", counted from the newest checkpoint" if failures < len(history) else ""
    return Decision(
        Verdict.RESTART,
        EXIT_FAILED,
        f"restart {failures} of {max_restarts}{since}",
        max_restarts - failures,
        delay_s=_delay(history),
        waits_for=history[-1].resource,
    )


def failures_since_progress(history: Sequence[AttemptEnd]) -> int:
    """Count the failed attempts that count against the budget: those since the last new checkpoint."""
    return len(_since_progress(history))


def _since_progress(history: Sequence[AttemptEnd]) -> Sequence[AttemptEnd]:
    newest = max((number for number, end in enumerate(history) if end.made_checkpoint), default=0)
    return history[newest:]


def _stopped_for_straggler(last: AttemptEnd) -> bool:
    """Tell whether the job asked itself to stop, and did; nobody else had asked."""
    if last.straggler is None or last.ended_by in (EndedBy.INTERRUPT, EndedBy.PREEMPTION):
        return False
    codes = last.exit_codes.values()
    return EXIT_PREEMPTED in codes or (last.stop_agreed and bool(codes) and not any(codes))


def _wanted_ending(last: AttemptEnd) -> tuple[Verdict, int, str] | None:
    if last.ended_by is EndedBy.INTERRUPT:
        return Verdict.INTERRUPTED, EXIT_INTERRUPTED, last.leaving or "interrupted by the user"
    all_zero = bool(last.exit_codes) and all(code == 0 for code in last.exit_codes.values())
    if last.ended_by is EndedBy.PREEMPTION:
        # A script that saves and exits 0 on SIGTERM has not finished its training; one that said so has.
        if all_zero and last.all_done and not last.stop_agreed:
            return Verdict.FINISHED, EXIT_FINISHED, "all ranks finished while the job was asked to leave"
        return Verdict.PREEMPTED, EXIT_PREEMPTED, last.leaving or "the job was asked to leave"
    leaving = sorted(rank for rank, code in last.exit_codes.items() if code == EXIT_PREEMPTED)
    if _stopped_for_straggler(last):
        return Verdict.HARDWARE, EXIT_HARDWARE, f"a straggler, {last.straggler}"
    if leaving:
        reason = f"{_ranks(leaving)} left with {EXIT_PREEMPTED} (asked to be requeued)"
        return Verdict.PREEMPTED, EXIT_PREEMPTED, last.leaving or reason
    if all_zero and last.stop_agreed:
        return Verdict.PREEMPTED, EXIT_PREEMPTED, last.leaving or "all ranks stopped at the agreed step"
    return None


def _good_ending(last: AttemptEnd) -> tuple[Verdict, int, str] | None:
    if last.ended_by is EndedBy.RANKS and last.exit_codes and not any(last.exit_codes.values()):
        return Verdict.FINISHED, EXIT_FINISHED, "all ranks exited with 0"
    return None


def _hopeless(history: Sequence[AttemptEnd]) -> tuple[Verdict, int, str] | None:
    last = history[-1]
    if last.action == "requeue" and last.category == "scheduler" and last.confidence >= SURE:
        return Verdict.PREEMPTED, EXIT_PREEMPTED, f"the scheduler ends this job ({last.cause})"
    if last.action == "exclude_node" and last.category == "hardware" and last.confidence >= SURE:
        return Verdict.HARDWARE, EXIT_HARDWARE, f"{last.cause}, so this node should be left out"
    if len(history) >= 2 and _same_user_error(history[-2], last):
        reason = "the same error ended two attempts in a row, so another one would end alike"
        return Verdict.STOP, EXIT_STOP, reason
    recent = history[-STARTUP_FAILURES:]
    if len(recent) == STARTUP_FAILURES and not any(map(_got_going, recent)):
        reason = f"{STARTUP_FAILURES} attempts in a row ended before their first completed step"
        return Verdict.STOP, EXIT_STOP, reason
    return _cause_spent(history)


def _cause_spent(history: Sequence[AttemptEnd]) -> tuple[Verdict, int, str] | None:
    """End a job that the same cause ended too often without a new checkpoint in between.

    The taxonomy has the cap; it never ends a job before `CAUSE_RETRIES`. Causes that pass by themselves have the job's
    budget alone, and so has a script that saves by itself, because its progress is not seen.
    """
    last = history[-1]
    known = lookup(last.cause)
    if known.persistence == "transient" or last.confidence < SURE or last.checkpoint_after is None:
        return None
    times = sum(end.cause == last.cause for end in _since_progress(history))
    if times <= max(CAUSE_RETRIES, known.cap):
        return None
    reason = f"{last.cause} came {times} times without a new checkpoint in between: somebody has to look"
    if last.action in ("stop", "rollback"):
        return Verdict.STOP, EXIT_STOP, reason
    return Verdict.GIVE_UP, EXIT_FAILED, reason


def _got_going(end: AttemptEnd) -> bool:
    return end.completed_a_step is not False or end.made_checkpoint


def _same_user_error(previous: AttemptEnd, last: AttemptEnd) -> bool:
    if previous.error is None or last.error is None or last.category in _OUTSIDE:
        return False
    return previous.error == last.error


def _delay(history: Sequence[AttemptEnd]) -> float:
    waits = 0
    for end in reversed(history):
        if end.action != "wait":
            break
        waits += 1
    return min(_WAIT_CAP_S, _WAIT_FIRST_S * 2.0 ** (waits - 1)) if waits else 0.0


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"
