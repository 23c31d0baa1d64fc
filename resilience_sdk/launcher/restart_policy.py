"""The restart policy: a pure function of the attempts so far says what to do after one has ended.

Nothing here reads a clock, a file or the environment, so the rules are tested as rules. The order of the
rules in `decide` is the contract: what the user asked for (stop, preemption) beats what went wrong, and what
cannot get better by trying again beats the restart budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.exits import Resource
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.hang.culprit import MISMATCH
from resilience_sdk.postmortem.exit_codes import (
    EXIT_FINISHED,
    JobVerdict,
)
from resilience_sdk.postmortem.facts import STOP, UNSAVED, AttemptEnd, EndedBy

FREE_RESTART = "restart, not counted: first ending at this place"
FREE_OF_SERVER = "restart, not counted: no rank is at fault"
STARTUP_FAILURES = 3  # attempts in a row without one completed step: the program does not get going
CAUSE_RETRIES = 3  # of any cause: the third goes on from an older checkpoint, as two failures soon after a resume tell
FREE_ENDINGS = 3  # of one job, for hangs (more than the monitor grants are not believed) and lost fork servers
SURE = 0.8  # confidence from which a verdict may end the job: for hardware, for the scheduler, for a spent budget
_WRONG_USE = "resilience_sdk.errors.ConfigError"  # its message has the cure
_NOT_SAVED = "resilience_sdk.errors.NotSavedError"
_NO_CHECKPOINT = "resilience_sdk.errors.CheckpointError"
_REPAIR = "do what the error says of the checkpoints, or start over in another run directory (--fresh)"
_WAIT_FIRST_S = 5.0
_WAIT_CAP_S = 60.0
# Causes outside the program: the same message twice does not make them the program's fault.
_OUTSIDE = frozenset({"network", "storage", "hardware", "host", "scheduler"})


_MAY_BE_FREE = (EndedBy.HANG, EndedBy.SERVER)
_FREE_CAUSE = "port_in_use"  # of a port that the launcher has picked


@attrs.frozen
class Decision:
    """What happens now, after an attempt or (`requeue_policy`) after a run of the whole command.

    `reason` is one plain sentence for people, without a full stop; `restarts_left` are those of the budget that was
    asked; `exit_code` holds where it ends, and is the verdict's unless it is given; `delay_s` is the pause before the
    next one, in seconds; `waits_for` is what then has to work. `others_go_on`: it ends here alone, the job goes on
    without this node; `elsewhere`: another node has ended the job, and has written why. `advice`: what to do before
    it is started again, where more is known than the verdict tells.
    """

    verdict: JobVerdict
    reason: str
    restarts_left: int = 0
    exit_code: int = attrs.field(
        default=attrs.Factory(lambda self: self.verdict.exit_code, takes_self=True), kw_only=True
    )
    delay_s: float = 0.0
    waits_for: Resource | None = None
    others_go_on: bool = False
    elsewhere: bool = False
    advice: str | None = None

    @property
    def restarts(self) -> bool:
        """Tell whether another attempt, or run, is made."""
        return self.verdict is JobVerdict.RESTART

    @property
    def ends_the_job(self) -> bool:
        """Tell whether the other nodes have to end because of it: not where all finish, and not where they go on."""
        return self.verdict is not JobVerdict.FINISHED and not self.others_go_on

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
        return Decision(JobVerdict.RESTART, "going on without the slow node", left)
    ending = _wanted_ending(last) or _good_ending(last) or _requested_ending(last)
    if ending is None:
        ending = _hopeless(history)
    if ending is not None:
        verdict, reason = ending
        alone = verdict is JobVerdict.HARDWARE and last.spare_nodes > 0
        if alone and last.holds_store:
            reason += "; the others cannot go on, because it has the store of the rendezvous"
        go_on = alone and not last.holds_store
        return Decision(verdict, reason, left, others_go_on=go_on, advice=_advice(last, verdict))
    failures = failures_since_progress(history)
    if failures > max_restarts or not max_restarts:
        spent = f"{spent_words(max_restarts, 'restart', 'restarts')} without a new checkpoint"
        none = "no restart is allowed (--max-restarts 0)"
        return Decision(JobVerdict.GIVE_UP, spent if max_restarts else none)
    since = ", counted from the newest checkpoint" if _newest_progress(history) else ""
    counted = f"restart {failures} of {max_restarts}{since}"
    return Decision(
        JobVerdict.RESTART,
        counted if not ends_free(history) else FREE_RESTART if last.ended_by is EndedBy.HANG else FREE_OF_SERVER,
        left,
        delay_s=_delay(history),
        waits_for=history[-1].resource,
    )


def to_leave(by: str, when: str, *, interrupted: bool) -> Decision:
    """Return the end of a job that the signal `by` asked to leave while no rank ran; `when` says what is lost."""
    if interrupted:
        return Decision(JobVerdict.INTERRUPTED, f"interrupted by the user ({by}) {when}")
    return Decision(JobVerdict.PREEMPTED, f"the job was asked to leave by {by} to the launcher {when}")


def _advice(last: AttemptEnd, verdict: JobVerdict) -> str | None:
    if verdict is JobVerdict.GIVE_UP and last.requested is not None and last.requested.action == UNSAVED:
        return last.requested.advice or None
    if verdict is JobVerdict.STOP and last.error is not None and last.error.type == _NO_CHECKPOINT:
        return _REPAIR
    return None


def spent_words(budget: int, one: str, several: str) -> str:
    """Return that a budget of so many is spent: `its 1 restart is spent`, `all 3 restarts are spent`."""
    return f"its 1 {one} is spent" if budget == 1 else f"all {budget} {several} are spent"


def failures_since_progress(history: Sequence[AttemptEnd]) -> int:
    """Count the failed attempts that count against the budget: those since the last new checkpoint."""
    free = _free_endings(history)
    return sum(number not in free for number in range(_newest_progress(history), len(history)))


def ends_free(history: Sequence[AttemptEnd]) -> bool:
    """Tell whether the last attempt costs nothing of a budget: a hang, ended at its place for the first time, say."""
    return len(history) - 1 in _free_endings(history)


def _free_endings(history: Sequence[AttemptEnd]) -> frozenset[int]:
    """Return the places in `history`, which is all of the job's, of the ends that cost nothing of the budget."""
    free = [
        number
        for number, end in enumerate(history)
        if end.free and (end.ended_by in _MAY_BE_FREE or end.cause == _FREE_CAUSE or end.resource is not None)
    ]
    return frozenset(free[:FREE_ENDINGS])


def _newest_progress(history: Sequence[AttemptEnd]) -> int:
    """Return the place of the newest attempt with a checkpoint that is newer than all before; 0 where there is none.

    What an older checkpoint makes again is no progress: a job that dies at one step would restart for ever, since the
    quarantine of its newest checkpoint sends it back.
    """
    newest, best = 0, -1
    for number, end in enumerate(history):
        best = max(best, -1 if end.checkpoint_before is None else end.checkpoint_before)
        if end.checkpoint_after is not None and end.checkpoint_after > best:
            newest, best = number, end.checkpoint_after
    return newest


def _since_progress(history: Sequence[AttemptEnd]) -> Sequence[AttemptEnd]:
    return history[_newest_progress(history) :]


def _stopped_for_straggler(last: AttemptEnd) -> bool:
    """Tell whether the job asked itself to stop, and did; nobody else had asked."""
    if last.straggler is None or last.ended_by in (EndedBy.INTERRUPT, EndedBy.PREEMPTION):
        return False
    codes = last.exit_codes.values()
    return EXIT_PREEMPTED in codes or (last.stop_agreed and bool(codes) and not any(codes))


def _wanted_ending(last: AttemptEnd) -> tuple[JobVerdict, str] | None:
    if last.ended_by is EndedBy.INTERRUPT:
        return JobVerdict.INTERRUPTED, last.leaving or "interrupted by the user"
    all_zero = bool(last.exit_codes) and all(code == 0 for code in last.exit_codes.values())
    if last.ended_by is EndedBy.PREEMPTION:
        # A script that saves and exits 0 on SIGTERM has not finished its training; one that said so has.
        if all_zero and last.all_done and not last.stop_agreed:
            return JobVerdict.FINISHED, "all ranks finished while the job was asked to leave"
        return _asked_to_leave(last, "the job was asked to leave")
    leaving = sorted(rank for rank, code in last.exit_codes.items() if code == EXIT_PREEMPTED)
    if _stopped_for_straggler(last):
        return JobVerdict.HARDWARE, f"a straggler, {last.straggler}"
    if leaving:
        reason = f"{_ranks(leaving)} left with {EXIT_PREEMPTED} (asked to be requeued)"
        return _asked_to_leave(last, reason)
    if all_zero and last.stop_agreed:
        return _asked_to_leave(last, "all ranks stopped at the agreed step")
    return None


def _asked_to_leave(last: AttemptEnd, reason: str) -> tuple[JobVerdict, str]:
    """End a job that was asked to leave: to be requeued for nothing, unless it stood still then.

    Such a job uses the retries of whoever starts it again, as it would without the signal. Ranks that all left by
    themselves did not stand still for good.
    """
    reason = last.leaving or reason
    codes = set(last.exit_codes.values())
    if last.stood is None or (codes and codes <= {EXIT_FINISHED, EXIT_PREEMPTED}):
        return JobVerdict.PREEMPTED, reason
    return _broken(last) or (JobVerdict.GIVE_UP, reason)


def _good_ending(last: AttemptEnd) -> tuple[JobVerdict, str] | None:
    if last.ended_by is EndedBy.RANKS and last.exit_codes and not any(last.exit_codes.values()):
        if last.requested is not None and last.requested.action == UNSAVED:
            return JobVerdict.GIVE_UP, last.requested.reason
        if last.aborted:
            return (
                JobVerdict.FINISHED,
                f"all ranks were done; {_ranks(last.aborted)} died by SIGABRT after that",
            )
        return JobVerdict.FINISHED, "all ranks exited with 0"
    return None


def _requested_ending(last: AttemptEnd) -> tuple[JobVerdict, str] | None:
    """End the job, or its part on this node, where a rank that failed wants it so."""
    if last.requested is None:
        return None
    if last.requested.action == UNSAVED:
        # A rank that failed otherwise is started again: an end that could not be saved is no longer the last word.
        ended = last.error is not None and last.error.type == _NOT_SAVED
        return (JobVerdict.GIVE_UP, last.requested.reason) if ended else None
    if last.requested.action == STOP:
        return JobVerdict.STOP, f"a rank asked for the end of the job: {last.requested.reason}"
    return JobVerdict.HARDWARE, f"a rank asked to leave this node out: {last.requested.reason}"


def _hopeless(history: Sequence[AttemptEnd]) -> tuple[JobVerdict, str] | None:
    last, free = history[-1], _free_endings(history)
    if last.action == "requeue" and last.category == "scheduler" and last.confidence >= SURE:
        return JobVerdict.PREEMPTED, f"the scheduler ends this job ({last.cause})"
    if broken := _broken(last):
        return broken
    if last.final is not None and last.ended_by is EndedBy.HANG:
        return JobVerdict.STOP, last.final
    if bug := _proven_bug(history):
        return bug
    if ends_free(history):
        return None
    if last.error is not None and last.error.type == _WRONG_USE and last.completed_a_step is not True:
        return (
            JobVerdict.STOP,
            "what is wrong is how the program is set up, so another attempt would end alike",
        )
    # What was missing was a fault of its own: two equal errors around it did not come in a row.
    history = [end for number, end in enumerate(history) if number not in free or end.resource is not None]
    if len(history) >= 2 and _same_user_error(history[-2], last):
        reason = "the same error ended two attempts in a row, so another one would end alike"
        return JobVerdict.STOP, reason
    recent = history[-STARTUP_FAILURES:]
    if len(recent) == STARTUP_FAILURES and not any(map(_got_going, recent)):
        reason = f"{STARTUP_FAILURES} attempts in a row ended before their first completed step"
        return JobVerdict.STOP, reason
    return _cause_spent(history)


def _broken(last: AttemptEnd) -> tuple[JobVerdict, str] | None:
    if last.action == "exclude_node" and last.category == "hardware" and last.confidence >= SURE:
        return JobVerdict.HARDWARE, f"{last.cause}, so this node should be left out"
    return None


def _proven_bug(history: Sequence[AttemptEnd]) -> tuple[JobVerdict, str] | None:
    """End a job whose ranks call other collectives than one another at the place at which they did before.

    However the two attempts ended: a hang, an abort by the library or its time-out, an exception, whose rule is another
    one. The place is the step; where no rank completes steps that are counted, the program's lines.
    """
    last = history[-1]
    if not _is_mismatch(last) or not any(_is_mismatch(end) and _same_place(end, last) for end in history[:-1]):
        return None
    at = f"behind {last.reached} completed steps" if last.reached is not None else f"at {' and '.join(last.lines)}"
    return JobVerdict.STOP, (
        f"{MISMATCH} came twice {at}, which is a fault of the program: another attempt would end alike"
    )


def _is_mismatch(end: AttemptEnd) -> bool:
    return end.cause == MISMATCH and end.confidence >= SURE


def _same_place(one: AttemptEnd, other: AttemptEnd) -> bool:
    if one.reached is not None or other.reached is not None:
        return one.reached == other.reached
    return bool(one.lines) and one.lines == other.lines


def _cause_spent(history: Sequence[AttemptEnd]) -> tuple[JobVerdict, str] | None:
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
        return JobVerdict.STOP, reason
    return JobVerdict.GIVE_UP, reason


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
