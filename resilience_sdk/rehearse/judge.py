"""The judgement of a rehearsed job: each promise is held against what the job has left behind. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import Incident
from resilience_sdk.incidents.record import count_words, one_line, ranks_words
from resilience_sdk.rank.rehearsal import RehearsedRank, Weight
from resilience_sdk.rehearse.plan import Baseline, JobFacts

PASS, FAIL, SKIPPED = "PASS", "FAIL", "SKIPPED"
_SAME_WEIGHTS = 1e-5
"""Relative difference of two ends that are told to be equal: a reduction in another order rounds otherwise."""
_SLACK_STEPS = 2  # ranks are not at one place when one of them is struck, and loading a state may step an optimizer


@attrs.frozen
class PromiseResult:
    """One promise, and what came of it."""

    promise: str
    result: str
    """`PASS`, `FAIL` or `SKIPPED`."""
    why: str
    cure: str | None = None


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


def judge_baseline(baseline: Baseline, facts: JobFacts) -> list[PromiseResult]:
    """Return what the undisturbed run has kept: it ends well, is seen, nobody is blamed, and its saves are whole."""
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


def _judge_restart(kind: str) -> Callable[[_Ledger, Plan, Baseline, JobFacts], None]:
    def judge_it(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
        found = next((one for one in facts.incidents if one.kind == kind), None)
        latency = "" if found is None or found.detection_latency_s is None else f" in {found.detection_latency_s:.1f} s"
        ledger.hold(
            "noticed", found is not None, f"as a {kind}{latency}", f"no incident of the kind {kind} tells of it"
        )
        if found is not None:
            _hold_named(ledger, plan, found)
        _hold_others(ledger, facts, found)
        if _hold_recovered(ledger, baseline, facts):
            _hold_lost(ledger, plan, baseline, facts)

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


def _hold_recovered(ledger: _Ledger, baseline: Baseline, facts: JobFacts) -> bool:
    """Hold that the ranks were started again once, and that what was saved could be loaded."""
    code = facts.exit_codes[-1]
    attempts = 1 + max((trace.attempt for trace in facts.traces[-1]), default=0)
    later = [one_line(one) for one in facts.incidents if (one.attempt or 0) > 0 and one.kind != "slow"]
    has_recovered = code == 0 and attempts == 2
    ledger.hold(
        "recovered",
        has_recovered,
        "the ranks were started again, and trained on to the end",
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
            "write each checkpoint under another name, rename it when it is whole, and keep the one before it",
        )
    elif has_recovered:
        ledger.hold("save complete", True, f"gone on after {count_words(_resumed_at(baseline, facts))}", "")
    return has_recovered


def _resumed_at(baseline: Baseline, facts: JobFacts) -> int:
    """Return how many steps the last attempt had not to run."""
    return max(0, baseline.steps - min((len(trace.steps) for trace in facts.last_attempt), default=baseline.steps))


def _hold_lost(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    """Hold that no more is run again than what came after the newest save of the attempt that was struck."""
    lost = _lost(baseline, facts, plan.rank)
    struck = [trace for trace in facts.traces[0] if trace.attempt == 0]
    reached = max((len(trace.steps) for trace in struck if trace.rank == plan.rank), default=0)
    if not baseline.saves:
        ledger.skip("steps lost", f"the script saves nothing: all {count_words(lost)} were run again")
        return
    saved = sorted({after for trace in struck for after in trace.saves}, reverse=True)
    # Where a save was struck, it is the newest one.
    good = saved[1:] if plan.kind in ("disk-full", "corrupt-checkpoint") else saved
    most = reached - (good[0] if good else 0)
    ledger.hold(
        "steps lost",
        lost <= most + _SLACK_STEPS,
        f"{lost}, of {reached} since the start",
        f"{count_words(lost)} were run again, and the newest save was {count_words(most)} before the fault",
        "load the newest checkpoint at the start of the script",
    )


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
        if _hold_recovered(ledger, baseline, facts):
            _hold_lost(ledger, plan, baseline, facts)
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


_STOP_CURE = (
    "call preemption.check() once per step on every rank; where it is True, save and call preemption.exit(). A handler "
    "of SIGTERM of the script's own has to call the one that was there before it"
)


def _judge_preempt(ledger: _Ledger, plan: Plan, baseline: Baseline, facts: JobFacts) -> None:
    found = next((one for one in facts.incidents if one.kind == "preemption"), None)
    first = facts.traces[0]
    ran_on = bool(first) and all(len(trace.steps) >= baseline.steps for trace in first)
    agreed = bool(facts.named(Event.STOP_AGREED))
    asked_at = baseline.numbers.index(plan.step) if plan.step in baseline.numbers else 0
    ended = [event.get("rank") for event in facts.named(Event.RANK_EXIT) if event.get("signal")]
    ledger.hold(
        "noticed",
        found is not None and (agreed or not ran_on),
        "all ranks stopped at one step" if agreed else "the ranks were ended" if ended else "the ranks left",
        f"asked to leave at step {plan.step}, the job ran on to its end, {count_words(baseline.steps - asked_at)} later"
        if ran_on
        else "no incident tells of it",
        _STOP_CURE,
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
        _STOP_CURE,
    )
    if ran_on:
        ledger.hold("save complete", False, "", "nothing was saved for the signal: it was not heeded", _STOP_CURE)
    elif last == 0:
        lost = _lost(baseline, facts)
        ledger.hold(
            "save complete",
            lost <= 1,
            f"saved at the stop, and gone on after {count_words(_resumed_at(baseline, facts))}",
            f"the save at the signal does not work: {count_words(lost)} were run again",
            _STOP_CURE,
        )
        ledger.hold("steps lost", lost <= 1, "0", count_words(lost))


_JUDGES: Mapping[str, Callable[[_Ledger, Plan, Baseline, JobFacts], None]] = {
    "kill": _judge_restart("crash"),
    "exit": _judge_restart("crash"),
    "exception": _judge_restart("crash"),
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


# -- the end


@attrs.frozen
class Distance:
    """How far the weights of two ends are apart at most, in parts of their norm, and where that is."""

    most: float
    weight: int = 0
    """The number of that weight among those of its rank's optimizers, from 0."""
    shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    """Those whose weights are not the same."""

    @property
    def is_none(self) -> bool:
        """Whether the ends are told to be equal."""
        return self.most <= _SAME_WEIGHTS


def difference(one: Sequence[RehearsedRank], other: Sequence[RehearsedRank]) -> Distance | str:
    """Return how far the weights of two ends are apart, or why they cannot be compared."""
    theirs = {trace.rank: trace.weights for trace in other}
    found = Distance(0.0)
    for trace in one:
        weights, others = trace.weights, theirs.get(trace.rank)
        if weights is None:
            return "there is no optimizer of torch, whose weights could be compared"
        if others is None or len(weights) != len(others):
            return "the last start had no step left to run"
        apart = [_apart(x, y) for x, y in zip(weights, others, strict=True)]
        most = max(apart, default=0.0)
        ranks = (*found.ranks, trace.rank) if most > _SAME_WEIGHTS else found.ranks
        worst = apart.index(most) if apart else 0
        if most > found.most:
            found = Distance(most, worst, weights[worst].shape)
        found = attrs.evolve(found, ranks=ranks)
    return found if one else "there is no optimizer of torch, whose weights could be compared"


def _apart(one: Weight, other: Weight) -> float:
    """Return how far norm or sum of two weights are apart, whichever is further, in parts of the norm."""
    if not all(map(math.isfinite, (one.norm, one.sum, other.norm, other.sum))):
        return math.inf
    scale = max(one.norm, other.norm, 1e-12)
    return max(abs(one.norm - other.norm), abs(one.sum - other.sum)) / scale


def judge_end(kind: str, baseline: Baseline, facts: JobFacts, again: JobFacts | None) -> PromiseResult | None:
    """Return whether the weights at the end are those of the undisturbed run; None where another one has to tell.

    `again`: a second undisturbed run, which says whether the script ends twice alike at all.
    """
    promise = "end equal"
    if kind == "nan":
        return PromiseResult(promise, SKIPPED, "a step with a bad gradient cannot end as one without")
    if facts.exit_codes[-1] != 0 or not facts.traces[-1]:
        return PromiseResult(promise, SKIPPED, "the job did not come to its end")
    apart = difference(baseline.end, facts.last_attempt)
    if isinstance(apart, str):
        return PromiseResult(promise, SKIPPED, apart)
    if apart.is_none:
        told = "the same weights" if apart.most == 0 else f"the same weights to {apart.most:.0e}"
        return PromiseResult(promise, PASS, told)
    if again is None:
        return None
    own = difference(baseline.end, again.last_attempt)
    if isinstance(own, str) or not own.is_none:
        return PromiseResult(promise, SKIPPED, "two undisturbed runs end with other weights, too: seed the script")
    only = f" of {ranks_words(apart.ranks)} alone" if len(apart.ranks) < len(baseline.end) else ""
    return PromiseResult(
        promise,
        FAIL,
        f"the weights{only} end otherwise, where two undisturbed runs end alike: norm or sum of number {apart.weight}, "
        f"shape {list(apart.shape)}, by {apart.most:.1e} of its norm",
        _STATE_OF_EACH if only else _ALL_OF_THE_STATE,
    )


_ALL_OF_THE_STATE = "save and load all of the state: model, optimizer, scheduler, random numbers, the place in the data"
_STATE_OF_EACH = (
    "save and load on every rank what is that rank's own: its part of a sharded state, its random numbers, its place "
    "in the data"
)


def to_json(result: PromiseResult) -> dict[str, Any]:
    """Return one entry of `promises` of `resilience rehearse --json`."""
    return attrs.asdict(result)
