"""The judgement of a rehearsal: it must neither pass what is broken nor blame what works."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from planted_runs import attempt

from resilience_sdk.core.settings.fields import Settings
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import Culprit, Evidence, Incident
from resilience_sdk.rank.rehearsal import RehearsedRank, Weight
from resilience_sdk.rehearse import judge as judging
from resilience_sdk.rehearse import plan as planning
from resilience_sdk.rehearse.cures import ALL_OF_THE_STATE, STATE_OF_EACH
from resilience_sdk.rehearse.ends import judge_end
from resilience_sdk.rehearse.judge import FAIL, PASS, SKIPPED, judge, judge_baseline
from resilience_sdk.rehearse.plan import Baseline, JobFacts, faults_for, learn

STEPS, STUCK_S = 40, 4.0
ENDED = (Weight(1.0, 0.5, (8,)), Weight(2.0, -0.25, (4, 2)))


def rank(
    number: int, steps: range = range(STEPS), attempt: int = 0, saves: tuple[int, ...] = (), **facts: Any
) -> RehearsedRank:
    """Return the trace of a rank that took these steps, a tenth of a second each."""
    taken = tuple((step, step / 10) for step in steps)
    known = {"progress": "optimizer", "weights": ENDED, **facts}
    return RehearsedRank(attempt, number, taken, saves, began_s=0.0, **known)


def job(*starts: tuple[RehearsedRank, ...], codes: tuple[int | None, ...] = (0,), **facts: Any) -> JobFacts:
    """Return what a job of these starts has left."""
    return JobFacts(codes, 5.0, starts, facts.get("incidents", ()), facts.get("events", ()))


def both(*args: Any, **facts: Any) -> tuple[RehearsedRank, ...]:
    """Return the traces of two ranks that did the same."""
    return rank(0, *args, **facts), rank(1, *args, **facts)


UNDISTURBED = job(both(saves=(10, 20, 30, 40)))
SAVES_NOTHING = job(both())
BASELINE = learn(UNDISTURBED, 2)


def plan_of(kind: str, baseline: Baseline = BASELINE) -> Plan:
    """Return the fault that a rehearsal of this kind is about."""
    plans = faults_for(kind, baseline, STUCK_S)
    assert not isinstance(plans, str), plans
    return plans[0]


def struck(plan: Plan, *more: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the journal of a job in which the fault struck."""
    return ({"event": "fault_injected", "by": f"RESILIENCE_FAULT={plan}"}, *more)


def incident(kind: str, *ranks: int, attempt: int = 0) -> Incident:
    """Return an incident that names these ranks."""
    culprits = tuple(Culprit(number) for number in ranks)
    return Incident(id="0001", kind=kind, attempt=attempt, culprits=culprits, cause="a_cause", detection_latency_s=0.1)


def restarted(kind: str, *, first: int = 20, **changes: Any) -> JobFacts:
    """Return a job that was struck at step 25 and started again from step `first`."""
    plan = plan_of(kind)
    crash = incident("hang" if plan.kind == "hang" else "crash", plan.rank or 0)
    traces = both(range(26), 0, (10, 20), weights=None, progress=None) + both(range(first, STEPS), 1, (30, 40))
    known: dict[str, Any] = {"incidents": (crash,), "events": struck(plan)}
    return job(traces, **{**known, **changes})


def preempted(first: int = 28, *, ran_to: int = 28, codes: tuple[int, ...] = (75, 0), agreed: bool = True) -> JobFacts:
    """Return a job that was asked to leave at step 25, and started again from step `first`."""
    events = struck(plan_of("preempt"), *([{"event": "stop_agreed"}] if agreed else []))
    starts = both(range(ran_to), 0, (10, 20)), both(range(first, STEPS), 0, (30, 40))
    return job(*starts[: len(codes)], codes=codes, incidents=(incident("preemption"),), events=events)


def results(kind: str, facts: JobFacts, baseline: Baseline = BASELINE) -> dict[str, str]:
    """Return what came of each promise."""
    return {one.promise: one.result for one in judge(kind, plan_of(kind, baseline), baseline, facts)}


# -- the plan


def test_a_fault_strikes_between_two_saves() -> None:
    """So that there is something to go back to, and something to lose."""
    assert plan_of("kill") == Plan("kill", "sigkill", rank=1, step=25)
    assert plan_of("hang-gil") == Plan("hang", "gil", rank=1, step=25)
    assert plan_of("preempt").to == "job"
    assert plan_of("corrupt-checkpoint").rank == 0, "it is rank 0 that saves"


def test_without_saves_it_strikes_in_the_middle() -> None:
    """A loop that numbers its steps from 1 is struck at the number that it gives."""
    numbered = job(both(range(1, STEPS + 1)))
    assert plan_of("kill", learn(numbered, 2)).step == 21


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("kill", {"progress": None}, "no step is seen"),
        ("kill", {"steps": 3}, "too few"),
        ("disk-full", {"saves": ()}, "saves nothing"),
        ("slow", {"ranks": 1}, "compared with nobody"),
        ("slow", {"ranks": 1, "is_one_process": True}, "the script is one process"),
        ("slow", {}, "no section"),
        ("slow", {"section": "fwd", "steps": 20}, "windows of 8 steps"),
        ("nan", {}, "numerics.check"),
    ],
)
def test_what_cannot_be_rehearsed_says_why(kind: str, change: dict[str, Any], why: str) -> None:
    """A skipped fault has a reason that a user can act on."""
    told = faults_for(kind, attrs.evolve(BASELINE, **change), STUCK_S)
    assert isinstance(told, str)
    assert why in told


def test_what_needs_time_gets_it() -> None:
    """The rest of a job of milliseconds is made longer, and its end by far, so that a busy machine answers in time."""
    short = attrs.evolve(BASELINE, step_s=0.001)
    [_, soon, late] = faults_for("preempt", short, STUCK_S)
    assert isinstance(soon, Plan)
    assert isinstance(late, Plan)
    assert (soon.rank, late.rank, soon.step, late.step) == (None, None, 25, 33)
    left, later = STEPS - 25, STEPS - 33
    assert left * (soon.seconds or 0) > 5
    assert later * (late.seconds or 0) >= later * STUCK_S / 4, "but nobody sleeps for so long that he looks hung"
    assert left * (soon.seconds or 0) + later * (late.seconds or 0) > 12
    [_, late_alone] = faults_for("preempt", attrs.evolve(BASELINE, step_s=1.0), 60.0)
    assert isinstance(late_alone, Plan)
    assert len(faults_for("preempt", attrs.evolve(BASELINE, step_s=4.0), 60.0)) == 1


def test_a_deadline_is_short_only_where_a_rank_stands_still() -> None:
    """Elsewhere it is a real job's: who is only slow, because the machine is busy, is not called hung."""
    assert planning.deadlines("hang", BASELINE).stuck_after_s == 4.0
    assert planning.deadlines("hang", attrs.evolve(BASELINE, longest_step_s=2.0)).stuck_after_s == 8.0
    assert planning.deadlines("pause", attrs.evolve(BASELINE, start_s=9.0)).stuck_after_s == 9.0, "it loads for so long"
    assert planning.deadlines("hang", attrs.evolve(BASELINE, start_s=900.0)).stuck_after_s == 60.0
    real = Settings()
    for kind in set(planning.FAULTS) - set(planning.STILL):
        assert planning.deadlines(kind, BASELINE).stuck_after_s == real.stuck_after
        assert planning.deadlines(kind, BASELINE).preempt_s == real.preempt_time
        assert planning.deadlines(kind, BASELINE, 3.0).stuck_after_s == 3.0, "but the user's own holds everywhere"
    assert planning.Deadlines() == planning.Deadlines(real.stuck_after, real.preempt_time)


@pytest.mark.parametrize(
    ("kind", "answer", "other"),
    [
        ("monitor-kill", {"event": "monitor_replaced"}, {"event": "monitor_start"}),
        ("nan", {"event": "incident", "kind": "numerics"}, {"event": "incident", "kind": "slow"}),
        ("slow", {"event": "straggler", "ranks": [1]}, {"event": "straggler", "ranks": [0]}),
        ("slow", {"event": "straggler", "ranks": [1]}, {"event": "straggler", "ranks": [1], "is_global": True}),
    ],
)
def test_a_job_is_slowed_down_until_it_has_answered(kind: str, answer: dict[str, Any], other: dict[str, Any]) -> None:
    """By the event that is waited for, and by no other."""
    plan = plan_of(kind, attrs.evolve(BASELINE, section="fwd", shows_loss=True))
    assert not planning.has_answer(kind, plan, struck(plan, other))
    assert planning.has_answer(kind, plan, struck(plan, other, answer))
    assert not planning.has_answer("preempt", plan_of("preempt"), (answer,)), (
        "all ranks leave at a step that is to come"
    )


def test_every_fault_has_an_estimate_and_a_judge() -> None:
    """What can be asked for can be judged."""
    assert set(judging._JUDGES) == set(planning.FAULTS)
    assert planning.estimate_s(planning.FAULTS, BASELINE) > 9 * BASELINE.seconds


# -- the undisturbed run


def test_an_undisturbed_run_keeps_its_promises() -> None:
    """It ends, is seen, and saves; one that saves nothing is no failure."""
    assert {one.result for one in judge_baseline(BASELINE, UNDISTURBED)} == {PASS}
    told = judge_baseline(learn(SAVES_NOTHING, 2), SAVES_NOTHING)
    assert [one.result for one in told] == [PASS, PASS, PASS, SKIPPED]


@pytest.mark.parametrize("progress", [None, "collectives"])
def test_a_job_without_a_step_fails(progress: str | None) -> None:
    """With the cure: nothing can be told of it but death."""
    unseen = job(both(range(0), progress=progress))
    [told] = [one for one in judge_baseline(learn(unseen, 2), unseen) if one.result == FAIL]
    assert told.promise == "progress seen"
    assert "heartbeat" in (told.cure or "")


def test_a_save_that_hangs_without_a_fault_fails() -> None:
    """As one that not all ranks call does."""
    hung = job(both(range(10)), codes=(1,), incidents=(incident("hang", 0, 1),))
    failed = {one.promise for one in judge_baseline(learn(hung, 2), hung) if one.result == FAIL}
    assert failed == {"exit code", "nobody blamed"}
    in_save = attrs.evolve(hung.incidents[0], culprits=(Culprit(0, section="checkpoint"), Culprit(1)))
    told = judge_baseline(learn(hung, 2), attrs.evolve(hung, incidents=(in_save,)))
    assert (told[-1].promise, told[-1].result) == ("save complete", FAIL)
    assert "every rank" in (told[-1].cure or "")


# -- faults that cost an attempt


@pytest.mark.parametrize("kind", ["kill", "exit", "exception", "hang", "hang-gil"])
def test_a_good_restart_passes(kind: str) -> None:
    """Noticed, named, and gone on from the newest save."""
    told = results(kind, restarted(kind))
    assert set(told.values()) == {PASS}
    assert set(told) >= {"noticed", "named", "nobody else blamed", "recovered", "steps lost", "exit code"}


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"incidents": ()}, "noticed"),
        ({"incidents": (incident("crash", 0),)}, "named"),
        ({"incidents": (incident("crash", 1, 0),)}, "nobody else blamed"),
        ({"incidents": (incident("crash", 1), incident("hang", 0))}, "nobody else blamed"),
        ({"codes": (1,)}, "recovered"),
        ({"codes": (None,)}, "exit code"),
        ({"first": 0}, "steps lost"),
    ],
)
def test_a_broken_promise_is_told(change: dict[str, Any], promise: str) -> None:
    """Each by its own line."""
    assert results("kill", restarted("kill", **change))[promise] == FAIL


def test_a_save_that_cannot_be_gone_on_from_fails() -> None:
    """A checkpoint that was written in place is torn by a death, and every attempt after it dies of it."""
    crashes = incident("crash", 0), incident("crash", 0, 1, attempt=1)
    facts = restarted("corrupt-checkpoint", codes=(77,), incidents=crashes)
    told = judge("corrupt-checkpoint", plan_of("corrupt-checkpoint"), BASELINE, facts)
    [save] = [one for one in told if one.promise == "save complete"]
    assert save.result == FAIL
    assert "rename" in (save.cure or "")


def test_a_torn_save_costs_the_steps_since_the_one_before() -> None:
    """No fault of the script's: the newest is the one that was torn."""
    assert results("corrupt-checkpoint", restarted("corrupt-checkpoint", first=10))["steps lost"] == PASS
    assert results("kill", restarted("kill", first=10))["steps lost"] == FAIL


def test_a_script_that_saves_nothing_loses_all_and_is_not_blamed() -> None:
    """It starts over, which is all that can be had."""
    nothing = learn(SAVES_NOTHING, 2)
    plan = plan_of("kill", nothing)
    traces = both(range(21), weights=None) + both(range(STEPS), 1)
    told = results("kill", job(traces, incidents=(incident("crash", 1),), events=struck(plan)), nothing)
    assert (told["save complete"], told["steps lost"], told["recovered"]) == (SKIPPED, SKIPPED, PASS)


def test_a_fault_that_struck_nothing_is_no_pass() -> None:
    """No save came any more, say."""
    told = judge("disk-full", plan_of("disk-full"), BASELINE, UNDISTURBED)
    assert [one.result for one in told] == [SKIPPED]


def test_a_job_that_is_struck_twice_starts_three_times() -> None:
    """The second death is no failure of the recovery, its steps are no loss of the first; a third one is."""
    plan = plan_of("kill-twice")
    crashes = incident("crash", 1), incident("crash", 1, attempt=1)
    first = both(range(26), 0, (10, 20), weights=None, progress=None)
    second = both(range(20, 22), 1, weights=None, progress=None)
    facts = job(first + second + both(range(20, STEPS), 2, (30, 40)), incidents=crashes, events=struck(plan))
    assert set(results("kill-twice", facts).values()) == {PASS}
    once = restarted("kill-twice", incidents=crashes[:1], events=struck(plan))
    assert results("kill-twice", once)["recovered"] == FAIL
    third = attrs.evolve(facts, incidents=(*crashes, incident("crash", 0, attempt=2)), exit_codes=(1,))
    assert results("kill-twice", third)["recovered"] == FAIL


def test_a_save_that_the_struck_rank_did_not_reach_does_not_count() -> None:
    """One that dies in an evaluation before the save: the others are in it already, and it is not whole."""
    first = rank(0, range(30), 0, (10, 20, 30), weights=None), rank(1, range(30), 0, (10, 20), weights=None)
    facts = job(first + both(range(20, STEPS), 1, (30, 40)), incidents=(incident("crash", 1),))
    plan = Plan("kill", "sigkill", rank=1, step=29, section="eval")
    told = judge("kill-in-eval", plan, BASELINE, attrs.evolve(facts, events=struck(plan)))
    assert {one.promise: one.result for one in told}["steps lost"] == PASS


def test_a_job_that_began_anew_has_no_save_that_was_gone_on_from() -> None:
    """Beside the FAIL of the steps that are lost there is no PASS of the save."""
    told = results("kill", restarted("kill", first=0))
    assert (told["steps lost"], told["save complete"]) == (FAIL, SKIPPED)


def with_weights(first: int, ran: int, number: int, saves: tuple[int, ...] = (), **facts: Any) -> RehearsedRank:
    """Return rank 0 of an attempt, whose weights show where it began."""
    return attrs.evolve(attempt(number, first, ran, saves), **facts)


ONE = learn(job((with_weights(0, STEPS, 0, (10, 20, 30, 40)),)), 1)
KILL = Plan("kill", "sigkill", rank=0, step=25)


def told_of_a_kill(*attempts: RehearsedRank) -> dict[str, judging.PromiseResult]:
    """Return each promise of a kill of the one rank behind 26 steps."""
    facts = job(attempts, incidents=(incident("crash", 0),), events=struck(KILL))
    return {one.promise: one for one in judge("kill", KILL, ONE, facts)}


def test_a_place_that_is_lost_is_no_save_that_was_not_loaded() -> None:
    """As many steps are run again, and the cure is another one."""
    told = told_of_a_kill(with_weights(0, 26, 0, (10, 20)), with_weights(20, 30, 1, (10, 20)))
    assert (told["save complete"].result, told["save complete"].why) == (PASS, "gone on after 20 steps")
    lost = told["steps lost"]
    assert (
        lost.why == "gone on with the state after 20 steps, and 10 more were run than were left: "
        "the place in the epoch is lost"
    )
    assert "place in the data" in (lost.cure or "")
    anew = told_of_a_kill(with_weights(0, 26, 0, (10, 20)), with_weights(0, STEPS, 1, (30, 40)))
    assert anew["save complete"].result == SKIPPED
    assert "were run again from the start" in anew["steps lost"].why
    older = told_of_a_kill(with_weights(0, 26, 0, (10, 20)), with_weights(10, 30, 1, (20, 30)))
    assert older["save complete"].result == SKIPPED
    assert older["steps lost"].why == "gone on after 10 steps, and the newest save was after 20"
    assert (
        older["steps lost"].cure == anew["steps lost"].cure == "load the newest checkpoint at the start of the script"
    )


@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate"])
def test_a_framework_without_its_adapter_has_one_cure(name: str) -> None:
    """The one line that does it all, and never a loop of its own."""
    anew = with_weights(0, 26, 0, (10, 20)), with_weights(0, STEPS, 1, (30, 40), frameworks=(name,))
    assert f"resilience_sdk.adapters.{name}." in (told_of_a_kill(*anew)["steps lost"].cure or "")
    place = with_weights(0, 26, 0, (10, 20)), with_weights(20, 30, 1, (10, 20), frameworks=(name,))
    assert f"resilience_sdk.adapters.{name}." in (told_of_a_kill(*place)["steps lost"].cure or "")
    there = with_weights(0, STEPS, 1, (30, 40), frameworks=(name,), adapters=(name,))
    cure = told_of_a_kill(anew[0], there)["steps lost"].cure or ""
    assert f"docs/adapters/{name}.md" in cure
    assert "callbacks of the Trainer:" not in cure


def told_of_a_stop(*starts: RehearsedRank) -> dict[str, judging.PromiseResult]:
    """Return each promise of a stop that was agreed, behind 28 steps."""
    plan = Plan("preempt", rank=0, step=25, to="job")
    events = struck(plan, {"event": "stop_agreed"})
    facts = job(*((one,) for one in starts), codes=(75, 0), incidents=(incident("preemption"),), events=events)
    return {one.promise: one for one in judge("preempt", plan, ONE, facts)}


def test_what_went_wrong_at_a_stop_is_said_as_what_it_is() -> None:
    """Nothing saved there, saved and not loaded, loaded and the place lost."""
    good = told_of_a_stop(with_weights(0, 28, 0, (10, 20, 28)), with_weights(28, 12, 0, (2, 12)))
    assert {one.result for one in good.values()} == {PASS}
    place = told_of_a_stop(with_weights(0, 28, 0, (10, 20, 28)), with_weights(28, 20, 0, (2, 12)))
    assert place["save complete"].result == PASS
    assert "the place in the epoch is lost" in place["steps lost"].why
    unsaved = told_of_a_stop(with_weights(0, 28, 0, (10, 20)), with_weights(20, 20, 0, (10, 20)))
    assert "saved nothing there" in unsaved["save complete"].why
    assert "where preemption.check() is True, save" in (unsaved["save complete"].cure or "")
    unloaded = told_of_a_stop(with_weights(0, 28, 0, (10, 20, 28)), with_weights(0, STEPS, 0, (10, 20)))
    assert unloaded["save complete"].why == "saved after 28 steps, and the next start began anew"
    assert "load the newest" in (unloaded["save complete"].cure or "")


def test_a_fault_before_the_first_save_has_no_save_to_judge() -> None:
    """It began anew, as it had to."""
    told = told_of_a_kill(with_weights(0, 26, 0), with_weights(0, STEPS, 1, (30, 40)))
    assert (told["save complete"].result, told["save complete"].why) == (SKIPPED, "nothing was saved before the fault")
    assert told["steps lost"].result == PASS


def test_a_stop_at_the_end_was_heeded() -> None:
    """Ranks that ask once per epoch come to it at the end of the last."""
    told = told_of_a_stop(with_weights(0, STEPS, 0, (10, 20, 40)), with_weights(STEPS, 0, 0))
    assert {one.result for one in told.values()} == {PASS}


# -- faults that cost nothing


def test_a_full_disk_is_survived_or_restarted_and_always_told() -> None:
    """Silence is the one thing that is wrong."""
    plan = plan_of("disk-full")
    survived = job(both(saves=(10, 20, 40)), events=struck(plan, {"event": "ckpt_fail"}))
    assert set(results("disk-full", survived).values()) == {PASS}
    assert set(results("disk-full", restarted("disk-full")).values()) == {PASS}
    silent = job(both(saves=(10, 20, 40)), events=struck(plan))
    assert results("disk-full", silent)["noticed"] == FAIL


def test_a_pause_ends_nobody() -> None:
    """A rank that goes on by itself was no hang."""
    events = struck(plan_of("pause"))
    assert set(results("pause", job(both(), events=events)).values()) == {PASS}
    ended = job(both(range(26)) + both(range(STEPS), 1), events=events, incidents=(incident("hang", 1),))
    assert results("pause", ended) == {"nobody else blamed": FAIL, "recovered": FAIL, "exit code": PASS}


def test_a_slow_rank_is_named() -> None:
    """By a verdict on it, not on the others."""
    baseline = attrs.evolve(BASELINE, section="fwd")
    events = struck(plan_of("slow", baseline), {"event": "straggler", "ranks": [1], "is_global": False})
    assert set(results("slow", job(both(), events=events), baseline).values()) == {PASS}
    unseen = job(both(), events=struck(plan_of("slow", baseline)))
    assert results("slow", unseen, baseline)["noticed"] == FAIL
    other = (events[0], {**events[1], "ranks": [0]})
    assert results("slow", job(both(), events=other), baseline)["named"] == FAIL


def test_a_monitor_is_replaced() -> None:
    """And the training hears nothing of it."""
    events = struck(plan_of("monitor-kill"))
    assert results("monitor-kill", job(both(), events=events))["noticed"] == FAIL
    assert set(results("monitor-kill", job(both(), events=(*events, {"event": "monitor_replaced"}))).values()) == {PASS}


def test_a_bad_number_is_told() -> None:
    """What follows from it is up to the policy."""
    baseline = attrs.evolve(BASELINE, shows_loss=True)
    events = struck(plan_of("nan", baseline))
    told = results("nan", job(both(), events=events, incidents=(incident("numerics", 1),)), baseline)
    assert (told["noticed"], told["recovered"], told["exit code"]) == (PASS, SKIPPED, PASS)
    assert results("nan", job(both(), events=events), baseline)["noticed"] == FAIL


# -- a stop that was asked for


def test_a_good_stop_passes() -> None:
    """All leave at one step with 75, and nothing is run again."""
    assert set(results("preempt", preempted()).values()) == {PASS}


def test_a_save_at_the_signal_that_does_not_work_fails() -> None:
    """The job goes on from the save before, whatever it left with."""
    told = results("preempt", preempted(first=20, agreed=False))
    assert (told["exit code"], told["save complete"], told["steps lost"]) == (PASS, FAIL, FAIL)


def test_a_place_in_the_epoch_that_is_lost_is_told_as_such() -> None:
    """The save works: the job goes on at the step of the stop, and trains the epoch from its start again."""
    starts = both(range(28), 0, (10, 20)), both(range(28, STEPS + 8), 0, (30, 40))
    events = struck(plan_of("preempt"), {"event": "stop_agreed"})
    facts = job(*starts, codes=(75, 0), incidents=(incident("preemption"),), events=events)
    told = {one.promise: one for one in judge("preempt", plan_of("preempt"), BASELINE, facts)}
    assert (told["save complete"].result, told["steps lost"].result) == (PASS, FAIL)
    assert told["steps lost"].why.startswith("gone on at step 28, 8 steps more were run")
    assert "StatefulDataLoader" in (told["steps lost"].cure or "")


def test_a_rank_that_is_left_behind_fails() -> None:
    """One rank has saved and left, and the others were killed for it."""
    facts = preempted(agreed=False)
    killed = {"event": "rank_exit", "rank": 1, "signal": "SIGTERM"}
    told = results("preempt", attrs.evolve(facts, events=(*facts.events, killed)))
    assert (told["all ranks left"], told["save complete"]) == (FAIL, PASS)


def test_a_signal_that_is_not_heeded_fails() -> None:
    """The job has run on to its end, so that nothing is lost this time."""
    told = results("preempt", preempted(first=STEPS, ran_to=STEPS, agreed=False))
    assert (told["noticed"], told["save complete"]) == (FAIL, FAIL)


def test_a_stop_with_another_code_fails() -> None:
    """A scheduler would not start it again."""
    assert results("preempt", preempted(codes=(1,)))["exit code"] == FAIL


# -- the end


def test_equal_weights_pass_and_others_fail_only_where_two_runs_end_alike() -> None:
    """A script without a seed is not blamed for ending differently."""
    facts = restarted("kill")
    assert judge_end("kill", BASELINE, facts, None) == judging.PromiseResult("end equal", PASS, "the same weights")
    moved = both(range(20, STEPS), 1, weights=(Weight(1.1, 0.5, (8,)), ENDED[1]))
    other = attrs.evolve(facts, traces=((*facts.traces[0][:2], *moved),))
    assert judge_end("kill", BASELINE, other, None) is None
    for again, result in ((UNDISTURBED, FAIL), (job(both(weights=(Weight(1.2, 0.5, (8,)), ENDED[1]))), SKIPPED)):
        told = judge_end("kill", BASELINE, other, again)
        assert told is not None
        assert told.result == result


def test_where_the_ends_differ_is_told_and_what_follows_from_the_ranks() -> None:
    """All ranks alike lack a part of the state; one alone lacks what is its own."""
    moved = (ENDED[0], attrs.evolve(ENDED[1], sum=0.75))
    all_ranks = judge_end("kill", BASELINE, job(both(weights=moved)), UNDISTURBED)
    one = judge_end("kill", BASELINE, job((rank(0), rank(1, weights=moved))), UNDISTURBED)
    assert all_ranks is not None
    assert one is not None
    assert all_ranks.why.startswith("the weights end otherwise")
    assert one.why.startswith("the weights of rank 1 alone end otherwise")
    assert all(
        "weight 1 of the optimizers, shape [4, 2] by 5.0e-01 of its norm" in told.why for told in (all_ranks, one)
    )
    named = learn(job(both(names=("fc.bias", "fc.weight"))), 2)
    by_name = judge_end("kill", named, job(both(weights=moved)), UNDISTURBED)
    assert by_name is not None
    assert by_name.why.endswith("norm or sum of fc.weight by 5.0e-01 of its norm")
    assert (all_ranks.cure, one.cure) == (ALL_OF_THE_STATE, STATE_OF_EACH)


def test_what_fails_by_itself_is_told_as_such() -> None:
    """`--here` is no cure for a script that fails anywhere."""

    def cure(text: str, **facts: Any) -> str | None:
        crash = Incident(kind="crash", evidence=(Evidence("exception", text),), **facts)
        return judge_baseline(BASELINE, job((), codes=(1,), incidents=(crash,)))[0].cure

    assert cure("FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'") == judging._EMPTY
    assert cure("ValueError: no") == judging._BY_ITSELF


def test_rounding_is_no_difference() -> None:
    """More than two ranks sum in another order after a restart."""
    rounded = tuple(attrs.evolve(one, norm=one.norm * (1 + 1e-7)) for one in ENDED)
    told = judge_end("kill", BASELINE, job(both(weights=rounded)), None)
    assert told is not None
    assert told.result == PASS


@pytest.mark.parametrize("weights", [None, ENDED[:1]])
def test_what_cannot_be_compared_is_skipped(weights: tuple[Weight, ...] | None) -> None:
    """No optimizer, or a last start that had nothing left to do."""
    told = judge_end("kill", BASELINE, job(both(weights=weights)), None)
    assert told is not None
    assert told.result == SKIPPED
