"""The judgement of a rehearsed job: each promise is held against what the job has left behind. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import Incident
from resilience_sdk.incidents.record import count_words, one_line
from resilience_sdk.rehearse import moments
from resilience_sdk.rehearse.cures import cure_of_loading, cure_of_place, cure_of_stop, cure_of_torn
from resilience_sdk.rehearse.plan import Baseline, JobFacts
from resilience_sdk.rehearse.resumes import SLACK_STEPS, Resume, last_resume

PASS, FAIL, SKIPPED = "PASS", "FAIL", "SKIPPED"


@attrs.frozen
class PromiseResult:
    """One promise, and what came of it."""

    promise: str
    result: str
    """`PASS`, `FAIL` or `SKIPPED`."""
    why: str
    cure: str | None = None
    component: str | None = None
    """What differs first from the undisturbed run, where that is known: at `step`, on `ranks`."""
    step: int | None = None
    ranks: tuple[int, ...] | None = None


class _Ledger:
    """The promises of one job, in the order in which they are judged."""

    def __init__(self) -> None:
        self.results: list[PromiseResult] = []

    def hold(self, promise: str, is_kept: bool, kept: str, broken: str, cure: str | None = None) -> bool:
        result = PromiseResult(promise, PASS, kept) if is_kept else PromiseResult(promise, FAIL, broken, cure)
        self.results.append(result)
        return is_kept

    def skip(self, promise: str, why: str) -> None:
        self.results.append(PromiseResult(promise, SKIPPED, why))


_NO_PROGRESS = (
    "put each step into `with heartbeat():`, or use run.steps(), an adapter or an optimizer of torch: without one, a "
    "slow job looks like a hung one"
)


_SHORTER = "give the script arguments that make it shorter, or let it take longer with --limit"
_EMPTY = "the job runs in an empty directory; --here runs it in this one"
_BY_ITSELF = "it fails without any fault of ours: run it alone by `resilience run`, mend that, and rehearse it then"
_MISSES_A_FILE = ("FileNotFoundError", "No such file", "ModuleNotFoundError", "NotADirectoryError")
_COLLECTIVE = "call save() and maybe_save() on every rank, not on rank 0 alone: all of them write"


def judge_baseline(baseline: Baseline, facts: JobFacts, why_unseen: str | None = None) -> list[PromiseResult]:
    """Return what the undisturbed run has kept: it ends well, is seen, nobody is blamed, and its saves are whole.

    `why_unseen`: why nothing of its steps can be seen, where that is known.
    """
    ledger = _Ledger()
    code = facts.exit_codes[0]
    blamed = _told(facts.incidents)
    ledger.hold(
        "exit code",
        code == 0,
        "0",
        f"{_code_words(code)} without any fault{': ' + blamed[0] if blamed else ''}",
        _SHORTER if code is None else _cure_of(facts.incidents),
    )
    ledger.hold("nobody blamed", not blamed, "no incident", "; ".join(blamed))
    if any(one.kind == "hang" and _in_a_save(one) for one in facts.incidents):
        ledger.hold("save complete", False, "", "the ranks wait for one another in a save", _COLLECTIVE)
        return ledger.results
    if code == 0 and why_unseen is not None:
        ledger.skip("rehearsed", why_unseen)
        return ledger.results
    if code == 0:
        ledger.hold(
            "progress seen",
            baseline.progress in ("heartbeats", "optimizer"),
            f"{count_words(baseline.steps)} by {baseline.progress}",
            "no step is seen" if baseline.progress is None else f"only {baseline.progress} are seen, no step",
            _NO_PROGRESS,
        )
    failed = [str(event.get("why") or event.get("error") or "") for event in facts.named(Event.CKPT_FAIL)]
    if failed:
        ledger.hold("save complete", False, "", f"{len(failed)} saves failed: {failed[0]}")
    elif code == 0 and baseline.saves:
        ledger.hold("save complete", True, f"saved after {_steps_words(baseline.saves)}", "")
    elif code == 0:
        why = "the script saves nothing with torch.save" if baseline.steps else "no step is seen, so no save has one"
        ledger.skip("save complete", why)
    return ledger.results


def _cure_of(incidents: Sequence[Incident]) -> str:
    told = [evidence.text for one in incidents for evidence in one.evidence]
    if any(name in line for line in told for name in _MISSES_A_FILE):
        return _EMPTY
    return next((one.advice for one in incidents if one.advice), _BY_ITSELF)


def _in_a_save(incident: Incident) -> bool:
    return any(culprit.section == "checkpoint" for culprit in incident.culprits)


def judge(kind: str, plan: Plan, baseline: Baseline, facts: JobFacts) -> list[PromiseResult]:
    """Return the promises of one rehearsed fault, but for that its end is equal; see `judge_end`."""
    ledger = _Ledger()
    if not any(event.get("by") == f"RESILIENCE_FAULT={plan}" for event in facts.named(Event.FAULT_INJECTED)):
        code = facts.exit_codes[-1]
        if code == 0:
            ledger.skip("noticed", f"{plan} met nothing that it could strike before the job ended")
        else:
            ledger.hold("exit code", False, "", f"{_code_words(code)}, before {plan} has struck")
        return ledger.results
    _JUDGES[kind](ledger, plan, baseline, facts)
    return ledger.results


def _told(incidents: Sequence[Incident], without: Incident | None = None) -> list[str]:
    # On a machine with other work a rank may really be slower, which no promise excludes.
    return [one_line(one) for one in incidents if one.kind != "slow" and one is not without]


def _code_words(code: int | None) -> str:
    return "it did not end in its time" if code is None else f"exit code {code}"


def _steps_words(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps[:4]] + (["..."] if len(steps) > 4 else [])
    return f"{', '.join(shown)} {'step' if list(steps) == [1] else 'steps'}"


# -- what follows from a fault that costs an attempt


def _judge_restart(kind: str, restarts: int = 1) -> Callable[[_Ledger, Plan, Baseline, JobFacts], None]:
    def judge_it(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
        found = next((one for one in facts.incidents if one.kind == kind), None)
        latency = "" if found is None or found.detection_latency_s is None else f" in {found.detection_latency_s:.1f} s"
        ledger.hold(
            "noticed", found is not None, f"as a {kind}{latency}", f"no incident of the kind {kind} tells of it"
        )
        if found is not None:
            _hold_named(ledger, plan, found)
        _hold_others(ledger, facts, found)
        _hold_recovered(ledger, plan, baseline, facts, restarts)

    return judge_it


def _hold_named(ledger: _Ledger, plan: Plan, found: Incident) -> None:
    named = [culprit.rank for culprit in found.culprits]
    ledger.hold(
        "named",
        plan.rank in named,
        f"rank {plan.rank}: {found.cause}",
        f"{f'rank {named[0]}' if named else 'nobody'} was named, not rank {plan.rank}",
    )
    others = sorted(set(named) - {plan.rank})
    if others:
        ledger.hold("nobody else blamed", False, "", f"rank {others[0]} was named too")


def _hold_others(ledger: _Ledger, facts: JobFacts, found: Incident | None = None) -> None:
    if any(result.promise == "nobody else blamed" for result in ledger.results):
        return
    # What fails in a later attempt is no wrong blame: it has not recovered.
    blamed = _told([one for one in facts.incidents if not one.attempt], found)
    ledger.hold("nobody else blamed", not blamed, "no other incident", f"{len(blamed)} more: {'; '.join(blamed[:2])}")


def _hold_recovered(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts, restarts: int = 1) -> None:
    """Hold that the ranks were started again so often, and that what was saved was gone on from."""
    code = facts.exit_codes[-1]
    attempts = 1 + max((trace.attempt for trace in facts.traces[-1]), default=0)
    later = [one_line(one) for one in facts.incidents if (one.attempt or 0) >= restarts and one.kind != "slow"]
    has_recovered = code == 0 and attempts == 1 + restarts
    ledger.hold(
        "recovered",
        has_recovered,
        f"the ranks were started again{'' if restarts == 1 else ' each time'}, and trained on to the end",
        f"the attempt that followed failed: {later[0]}" if later else f"{attempts} attempts, {_code_words(code)}",
    )
    ledger.hold("exit code", code == 0, "0", _code_words(code))
    if not baseline.saves:
        ledger.skip("save complete", "the script saves nothing with torch.save")
    elif later:
        ledger.hold(
            "save complete",
            False,
            "",
            "what was saved before the fault could not be gone on from",
            cure_of_torn(baseline.end),
        )
    elif has_recovered:
        resume = last_resume(baseline, facts)
        lost = _find_lost(plan, baseline, facts, resume)
        after = _resumed_at(baseline, facts) if resume.after is None else resume.after
        if lost.why is None and not after:
            ledger.skip("save complete", "nothing was saved before the fault")
        elif lost.is_of_loading or not after:
            ledger.skip("save complete", "the newest one was not gone on from: see the steps that are lost")
        else:
            ledger.hold("save complete", True, f"gone on after {count_words(after)}", "")
    if has_recovered:
        _hold_lost(ledger, plan, baseline, facts)


def _resumed_at(baseline: Baseline, facts: JobFacts) -> int:
    """Return how many steps the last attempt had not to run."""
    return max(0, baseline.steps - min((len(trace.steps) for trace in facts.last_attempt), default=baseline.steps))


@attrs.frozen
class _Lost:
    """The steps that were run again after a fault, and by what."""

    steps: int
    reached: int
    """How many the struck rank had done."""
    why: str | None = None
    """What is wrong with that; None: no more than came after the newest save."""
    cure: str | None = None
    is_of_loading: bool = False
    """Whether the newest save was not gone on from; else the place in the epoch is lost."""


def _find_lost(plan: Plan, baseline: Baseline, facts: JobFacts, resume: Resume) -> _Lost:
    """Return whether more is run again than what came after the newest save of the attempt that was struck."""
    lost = _lost(baseline, facts, plan.rank)
    struck = [trace for trace in facts.traces[0] if trace.attempt == 0]
    reached = max((len(trace.steps) for trace in struck if trace.rank == plan.rank), default=0)
    saved = sorted({after for trace in struck for after in trace.saves}, reverse=True)
    # Where a save was struck, it is the newest one. Else one behind the newest step may lack the rank that died before.
    is_in_save = plan.kind in ("disk-full", "corrupt-checkpoint") or plan.where == "save"
    good = saved[1:] if is_in_save else [after for after in saved if after < reached]
    newest = good[0] if good else 0
    later = [len(trace.steps) for trace in facts.traces[0] if trace.rank == plan.rank]
    most = max(0, reached - newest + sum(later[1:-1]))
    if lost <= most + SLACK_STEPS:
        return _Lost(lost, reached)
    traces, after = facts.last_attempt, resume.after
    if after is not None and after and after >= newest - SLACK_STEPS:
        why = f"{_place_words(after, resume.more)}: the place in the epoch is lost"
        return _Lost(lost, reached, why, cure_of_place(traces, resume))
    if after:
        why = f"gone on after {count_words(after)}, and the newest save was after {newest}"
    else:
        began = " from the start" if after == 0 else ""
        why = f"{count_words(lost)} were run again{began}, and the newest save was {count_words(most)} before the fault"
    return _Lost(lost, reached, why, cure_of_loading(traces), is_of_loading=True)


def _place_words(after: int, more: int) -> str:
    return f"gone on with the state after {count_words(after)}, and {more} more were run than were left"


def _hold_lost(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    lost = _find_lost(plan, baseline, facts, last_resume(baseline, facts))
    if not baseline.saves:
        ledger.skip("steps lost", f"the script saves nothing: all {count_words(lost.steps)} were run again")
        return
    told = f"{lost.steps}, of {lost.reached} since the start"
    ledger.hold("steps lost", lost.why is None, told, lost.why or "", lost.cure)


def _lost(baseline: Baseline, facts: JobFacts, rank: int | None = None) -> int:
    """Return how many steps a rank has run more than once; None: the one that ran the most of them."""
    run: dict[int, int] = {}
    for trace in (trace for start in facts.traces for trace in start):
        run[trace.rank] = run.get(trace.rank, 0) + len(trace.steps)
    most = max(run.values(), default=0) if rank is None else run.get(rank, 0)
    return max(0, most - baseline.steps)


# -- what follows from one that does not


def _judge_disk_full(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    crash = next((one for one in facts.incidents if one.kind == "crash"), None)
    is_survived = bool(facts.named(Event.CKPT_FAIL)) and crash is None
    ledger.hold(
        "noticed",
        is_survived or crash is not None,
        "as a save that failed" if is_survived else f"as a crash: {crash.cause if crash else ''}",
        "no failed save and no incident tells of it",
        "do not pass over the error of a save in silence",
    )
    if crash is not None:
        _hold_named(ledger, plan, crash)
    _hold_others(ledger, facts, crash)
    if crash is not None:
        _hold_recovered(ledger, plan, baseline, facts)
        return
    _hold_undisturbed(ledger, facts, "the training went on past the save that failed")


def _hold_undisturbed(ledger: _Ledger, facts: JobFacts, kept: str) -> None:
    attempts = 1 + max((trace.attempt for trace in facts.traces[-1]), default=0)
    ledger.hold("recovered", attempts == 1, kept, f"the ranks were ended, and there were {attempts} attempts")
    code = facts.exit_codes[-1]
    ledger.hold("exit code", code == 0, "0", _code_words(code))


def _judge_pause(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    _hold_others(ledger, facts)
    _hold_undisturbed(ledger, facts, f"stopped for {plan.seconds:g} s, rank {plan.rank} went on, and nobody was ended")


def _judge_monitor_kill(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    is_replaced = bool(facts.named(Event.MONITOR_REPLACED))
    ledger.hold("noticed", is_replaced, "another monitor took its place", "no other monitor took its place")
    _hold_others(ledger, facts)
    _hold_undisturbed(ledger, facts, "the training took no notice")


def _judge_slow(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    verdicts = list(_slow_ranks(facts))
    ledger.hold(
        "noticed",
        bool(verdicts),
        "as a straggler",
        f"rank {plan.rank} took {plan.seconds:g} s more in each {plan.section!r}, and no straggler was told",
    )
    if verdicts:
        ledger.hold("named", plan.rank in verdicts, f"rank {plan.rank}", f"rank {verdicts[0]} was, not {plan.rank}")
    _hold_others(ledger, facts)
    _hold_undisturbed(ledger, facts, "it was told, and nobody was ended")


def _slow_ranks(facts: JobFacts) -> Iterator[int]:
    for event in facts.named(Event.STRAGGLER):
        if isinstance(ranks := event.get("ranks"), list) and not event.get("is_global"):
            yield from (rank for rank in ranks if isinstance(rank, int))


def _judge_nan(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    found = next((one for one in facts.incidents if one.kind == "numerics"), None)
    ledger.hold(
        "noticed",
        found is not None,
        f"as {found.cause if found else ''}",
        "no incident tells of a loss that is not a number",
        "call numerics.check(loss=loss) in every step",
    )
    if found is not None:
        ledger.skip("named", "what is not a number reaches every rank with the next gradients")
    _hold_others(ledger, facts, found)
    code = facts.exit_codes[-1]
    attempts = 1 + max((trace.attempt for trace in facts.traces[-1]), default=0)
    if attempts == 1:
        ledger.skip("recovered", "numerics=warn tells of it, and goes on; with rollback the job goes back")
    ledger.hold("exit code", code == 0, "0", _code_words(code))


# -- the stop that was asked for


def _judge_preempt(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    found = next((one for one in facts.incidents if one.kind == "preemption"), None)
    first = facts.traces[0]
    agreed = bool(facts.named(Event.STOP_AGREED))
    ran_on = not agreed and bool(first) and all(len(trace.steps) >= baseline.steps for trace in first)
    asked_at = baseline.numbers.index(plan.step) if plan.step in baseline.numbers else 0
    ended = [event.get("rank") for event in facts.named(Event.RANK_EXIT) if event.get("signal")]
    stop_cure = cure_of_stop(baseline.end)
    ledger.hold(
        "noticed",
        found is not None and (agreed or not ran_on),
        "all ranks stopped at one step" if agreed else "the ranks were ended" if ended else "the ranks left",
        f"asked to leave at step {plan.step}, the job ran on to its end, {count_words(baseline.steps - asked_at)} later"
        if ran_on
        else "no incident tells of it",
        stop_cure,
    )
    _hold_others(ledger, facts, found)
    code = facts.exit_codes[0]
    ledger.hold("exit code", code == EXIT_PREEMPTED, "75", _code_words(code))
    if len(facts.exit_codes) < 2:
        return
    last = facts.exit_codes[1]
    ledger.hold("recovered", last == 0, "started again, it trained to the end", f"started again: {_code_words(last)}")
    if not baseline.saves:
        ledger.skip("save complete", "the script saves nothing with torch.save, so there is nothing to keep")
        return
    ledger.hold(
        "all ranks left",
        not ended,
        "by themselves",
        f"rank {ended[0] if ended else ''} did not leave by itself, and was ended by a signal",
        stop_cure,
    )
    if ran_on:
        ledger.hold("save complete", False, "", "nothing was saved for the signal: it was not heeded", stop_cure)
    elif last == 0:
        _hold_stop(ledger, baseline, facts, was_ended=bool(ended))


def _hold_stop(ledger: _Ledger, baseline: Baseline, facts: JobFacts, *, was_ended: bool) -> None:
    """Hold that the state was saved where the ranks stopped, and that the next start went on there."""
    lost, resume, goes_on_at = _lost(baseline, facts), last_resume(baseline, facts), _went_on_at(facts)
    traces = facts.last_attempt
    reached = min((len(trace.steps) for trace in facts.traces[0]), default=0)
    saved = max((after for trace in facts.traces[0] for after in trace.saves), default=0)
    after = _resumed_at(baseline, facts) if resume.after is None else resume.after
    is_gone_on = resume.after is not None and saved >= reached - 1 and resume.after >= reached - 1
    is_kept = lost <= 1 or goes_on_at is not None or is_gone_on
    where = f"at step {goes_on_at}" if goes_on_at is not None and lost > 1 else f"after {count_words(after)}"
    why, cure = f"{count_words(lost)} were run again: nothing was saved at the signal", None
    if was_ended:
        pass  # the cure stands beside the rank that was ended
    elif saved < reached - 1:
        why = f"the ranks stopped after {count_words(reached)}, and saved nothing there: {lost} were run again"
        cure = cure_of_stop(baseline.end, has_stopped=True)
    else:
        went = f"went on after {count_words(after)}" if after else "began anew"
        why, cure = f"saved after {count_words(saved)}, and the next start {went}", cure_of_loading(traces)
    ledger.hold("save complete", is_kept, f"saved at the stop, and gone on {where}", why, cure)
    if is_kept and lost > 1:
        more = (
            f"gone on {where}, {count_words(lost)} more were run than without the stop: the place in the epoch is lost"
        )
        ledger.hold("steps lost", False, "", more, cure_of_place(traces, resume))
    elif is_kept:
        ledger.hold("steps lost", True, "0", "")
    else:
        ledger.hold("steps lost", False, "", count_words(lost))


def _went_on_at(facts: JobFacts) -> int | None:
    """Return the step at which the next start went on where the stop was, by the loop's numbers; None: it did not."""
    first, second = facts.traces[0], facts.last_attempt
    reached = max((trace.steps[-1][0] for trace in first if trace.steps), default=-1)
    begun = min((trace.steps[0][0] for trace in second if trace.steps), default=-1)
    return begun if 0 < reached <= begun <= reached + 1 else None


_JUDGES: Mapping[str, Callable[[_Ledger, Plan, Baseline, JobFacts], None]] = {
    "kill": _judge_restart("crash"),
    "exit": _judge_restart("crash"),
    "exception": _judge_restart("crash"),
    **{kind: _judge_restart("crash", 2 if kind == moments.TWICE else 1) for kind in moments.KINDS},
    "corrupt-checkpoint": _judge_restart("crash"),
    "hang": _judge_restart("hang"),
    "hang-gil": _judge_restart("hang"),
    "disk-full": _judge_disk_full,
    "pause": _judge_pause,
    "monitor-kill": _judge_monitor_kill,
    "slow": _judge_slow,
    "nan": _judge_nan,
    "preempt": _judge_preempt,
}


def to_json(result: PromiseResult) -> dict[str, Any]:
    """Return one entry of `promises` of `resilience rehearse --json`."""
    return attrs.asdict(result)
