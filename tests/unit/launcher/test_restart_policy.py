"""The rules after an attempt ended, as rules."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.exits import PORT, Resource
from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.launcher.restart_policy import (
    FREE_ENDINGS,
    FREE_OF_SERVER,
    FREE_RESTART,
    decide,
    failures_since_progress,
)
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.facts import EXCLUDE_NODE, STOP, UNSAVED, AttemptEnd, EndedBy, EndingRequest, KnownError

CRASH = AttemptEnd(0, EndedBy.RANKS, {0: -15, 1: -9}, cause="rank_killed_sigkill", category="process")
ERROR = KnownError("ValueError", "bad", "train.py:3 main")
USER_ERROR = attrs.evolve(CRASH, error=ERROR, category="user", cause="user_code_error", action="stop")
WITHOUT = "going on without the slow node"
FINISHED = AttemptEnd(0, EndedBy.RANKS, {0: 0, 1: 0})


def saved(end, before, after):
    return attrs.evolve(end, checkpoint_before=before, checkpoint_after=after)


errors = st.none() | st.builds(
    KnownError, st.sampled_from(["A", "B"]), st.just("m"), st.none(), st.none() | st.integers(0, 2)
)
ends = st.builds(
    AttemptEnd,
    attempt=st.integers(0, 9),
    ended_by=st.sampled_from([by for by in EndedBy if by is not EndedBy.MEMBERSHIP]),
    exit_codes=st.dictionaries(st.integers(0, 3), st.sampled_from([0, 1, 75, -9, -15]), max_size=4),
    error=errors,
    category=st.sampled_from(["user", "network", "process", "hardware", "scheduler"]),
    cause=st.sampled_from(sorted(causes())),
    action=st.sampled_from(["restart", "stop", "wait", "exclude_node", "rollback", "requeue"]),
    confidence=st.sampled_from([0.3, 0.9]),
    completed_a_step=st.sampled_from([None, True, False]),
    checkpoint_before=st.none() | st.integers(0, 3),
    checkpoint_after=st.none() | st.integers(0, 3),
    stop_agreed=st.booleans(),
    all_done=st.booleans(),
    straggler=st.none() | st.just("rank 3 is slow"),
    straggler_is_here=st.booleans(),
    spare_nodes=st.integers(0, 2),
    holds_store=st.booleans(),
    stood=st.none() | st.just("rank 1 made no progress"),
    free=st.booleans(),
    final=st.none() | st.just("it hung here for the third time"),
    requested=st.none()
    | st.builds(EndingRequest, st.sampled_from([STOP, EXCLUDE_NODE]), st.just("as a policy has it")),
)


@given(st.lists(ends, min_size=1, max_size=6), st.integers(0, 4))
def test_every_history_has_a_decision_whose_parts_agree(history, budget):
    """The exit code belongs to the verdict, and what is left of the budget is never negative or above it."""
    decision = decide(history, budget)
    codes = {
        JobVerdict.FINISHED: 0,
        JobVerdict.PREEMPTED: 75,
        JobVerdict.HARDWARE: 76,
        JobVerdict.STOP: 77,
        JobVerdict.INTERRUPTED: 130,
    }
    assert decision.exit_code == codes.get(decision.verdict, 1)
    assert 0 <= decision.restarts_left <= budget
    assert decision.reason
    assert decision.delay_s >= 0
    if decision.restarts and decision.reason != WITHOUT:
        assert budget > 0
        assert 75 not in history[-1].exit_codes.values()
    if decision.restarts:
        assert history[-1].ended_by in (EndedBy.RANKS, EndedBy.HANG, EndedBy.SERVER)
    if decision.others_go_on:
        assert decision.verdict is JobVerdict.HARDWARE
        assert history[-1].spare_nodes
        assert not decision.ends_the_job


@given(st.lists(ends, min_size=1, max_size=6), st.integers(0, 4))
def test_a_larger_budget_never_ends_a_job_earlier(history, budget):
    """One more restart allowed turns "give up" into "restart" at most."""
    less, more = decide(history, budget), decide(history, budget + 1)
    assert less.verdict == more.verdict or (less.verdict, more.verdict) == (JobVerdict.GIVE_UP, JobVerdict.RESTART)


@given(st.integers(0, 5))
def test_without_progress_there_are_exactly_as_many_restarts_as_allowed(budget):
    """`max_restarts` restarts, then the end."""
    verdicts = [decide([CRASH] * n, budget).verdict for n in range(1, budget + 2)]
    assert verdicts == [JobVerdict.RESTART] * budget + [JobVerdict.GIVE_UP]


@pytest.mark.parametrize(
    ("budget", "told"),
    [(0, "no restart is allowed"), (1, "its 1 restart is spent"), (2, "all 2 restarts are spent")],
)
def test_a_spent_budget_is_told_in_words_that_fit_its_number(budget, told):
    """One restart is not "all 1 restarts"."""
    assert decide([CRASH] * (budget + 1), budget).reason.startswith(told)


def test_a_new_checkpoint_gives_the_budget_back():
    """An older or equal one does not; none at all does not."""
    assert failures_since_progress([CRASH, CRASH, saved(CRASH, 10, 20)]) == 1
    assert failures_since_progress([CRASH, saved(CRASH, 10, 20), saved(CRASH, 20, 20)]) == 2
    assert failures_since_progress([saved(CRASH, None, 5), CRASH]) == 2
    again = [saved(CRASH, 5, 10), saved(CRASH, 10, 10), saved(CRASH, 5, 10), saved(CRASH, 10, 10)]
    assert failures_since_progress(again) == 4  # passed over, and made again
    assert failures_since_progress([*again, saved(CRASH, 10, 15)]) == 1
    assert decide([CRASH, CRASH, CRASH, saved(CRASH, None, 1)], 3).restarts
    assert decide([CRASH, CRASH, CRASH, CRASH], 3).verdict is JobVerdict.GIVE_UP
    assert decide([saved(CRASH, None, 1)], 0).verdict is JobVerdict.GIVE_UP


def test_the_same_user_error_twice_in_a_row_stops_the_job():
    """Once is retried; another error, another step, or an attempt between them starts the count again."""
    assert decide([USER_ERROR], 3).restarts
    assert decide([USER_ERROR, USER_ERROR], 3).verdict is JobVerdict.STOP
    assert decide([USER_ERROR, CRASH, USER_ERROR], 3).restarts
    for field, value in (("message", "worse"), ("user_frame", "train.py:4 main"), ("type", "KeyError")):
        other = attrs.evolve(USER_ERROR, error=attrs.evolve(ERROR, **{field: value}))
        assert decide([USER_ERROR, other], 3).restarts
    at_step = [attrs.evolve(USER_ERROR, error=attrs.evolve(ERROR, step=step)) for step in (4, 5, 5)]
    assert decide(at_step[:2], 3).restarts
    assert decide(at_step[1:], 3).verdict is JobVerdict.STOP


def test_a_proven_bug_that_comes_again_at_its_step_stops_the_job():
    """However each of the two ended, and whatever was between them; one at another step, or unsure, does not."""
    hang = AttemptEnd(
        0, EndedBy.HANG, {0: -9, 1: -9}, category="user", cause="user_collective_mismatch", confidence=0.9, reached=180
    )
    abort = attrs.evolve(hang, ended_by=EndedBy.RANKS, exit_codes={0: -6, 1: -15})
    raised = attrs.evolve(abort, error=ERROR)
    assert decide([hang], 9).restarts
    for second in (hang, abort, raised):
        decision = decide([hang, CRASH, second], 9)
        assert (decision.verdict, decision.exit_code) == (JobVerdict.STOP, 77)
        assert "user_collective_mismatch came twice behind 180 completed steps" in decision.reason
    for other in (
        {"reached": 181},
        {"reached": None},
        {"confidence": 0.4},
        {"cause": "rank_abort", "category": "process"},
    ):
        assert decide([hang, attrs.evolve(abort, **other)], 9).restarts
    code = attrs.evolve(raised, cause="user_code_error")
    assert decide([code, attrs.evolve(code, error=attrs.evolve(ERROR, message="worse"))], 9).restarts


def test_a_proven_bug_is_known_by_its_lines_where_no_steps_are_counted():
    """A loop without an optimizer: the same lines of the program, and never none."""
    bug = AttemptEnd(
        0, EndedBy.RANKS, {0: 1, 1: 1}, category="user", cause="user_collective_mismatch", confidence=0.8,
        lines=("train.py:20 <module>", "train.py:29 <module>"),
    )  # fmt: skip
    decision = decide([bug, CRASH, bug], 9)
    assert (decision.verdict, decision.exit_code) == (JobVerdict.STOP, 77)
    assert "twice at train.py:20 <module> and train.py:29 <module>" in decision.reason
    for other in ({"lines": ("train.py:21 <module>",)}, {"lines": ()}, {"reached": 4}):
        assert decide([bug, attrs.evolve(bug, **other)], 9).restarts
    assert decide([attrs.evolve(bug, lines=())] * 2, 9).restarts


@pytest.mark.parametrize("category", ["network", "storage", "hardware", "host"])
def test_the_same_message_from_outside_the_program_is_no_user_error(category):
    """A disk that is full twice is retried: the program is not at fault."""
    end = attrs.evolve(USER_ERROR, category=category, action="wait")
    decision = decide([end, end], 3)
    assert decision.restarts
    assert decision.delay_s > decide([end], 3).delay_s > 0


def test_three_attempts_without_a_first_step_stop_the_job():
    """Unknown progress proves nothing, and one attempt that got going starts the count again."""
    stuck, stepping = (attrs.evolve(CRASH, completed_a_step=done) for done in (False, True))
    assert decide([stuck] * 2, 9).restarts
    assert decide([stuck] * 3, 9).verdict is JobVerdict.STOP
    assert decide([stuck, stuck, stepping, stuck], 9).restarts
    assert decide([CRASH] * 3, 9).restarts
    saving = attrs.evolve(stuck, checkpoint_after=5)
    assert decide([stuck, saving, stuck], 9).restarts


def test_what_the_user_or_the_scheduler_asked_for_comes_first():
    """75 wins over a crash beside it, an agreed stop over success, Ctrl-C over everything."""
    assert decide([FINISHED], 3).verdict is JobVerdict.FINISHED
    assert decide([attrs.evolve(FINISHED, stop_agreed=True)], 3).verdict is JobVerdict.PREEMPTED
    assert decide([attrs.evolve(CRASH, exit_codes={0: 75, 1: 1})], 3).verdict is JobVerdict.PREEMPTED
    assert decide([attrs.evolve(USER_ERROR, ended_by=EndedBy.INTERRUPT)] * 2, 3).exit_code == 130
    left = attrs.evolve(FINISHED, ended_by=EndedBy.PREEMPTION)
    assert decide([left], 3).exit_code == 75
    assert decide([attrs.evolve(left, all_done=True)], 3).exit_code == 0


def test_a_stop_for_a_straggler_is_requeued_elsewhere_unless_somebody_else_asked():
    """76 where the job stopped itself for it; a signal at the same time is 75, an end without a stop what it is."""
    slow = attrs.evolve(FINISHED, straggler="rank 3 is slow; leave out node n7")
    for stopped in (attrs.evolve(slow, exit_codes={0: 75, 1: 75}), attrs.evolve(slow, stop_agreed=True)):
        decision = decide([stopped], 3)
        assert (decision.verdict, decision.exit_code) == (JobVerdict.HARDWARE, 76)
        assert decision.reason == "a straggler, rank 3 is slow; leave out node n7"
        assert decide([attrs.evolve(stopped, ended_by=EndedBy.PREEMPTION)], 3).exit_code == 75
    assert decide([slow], 3).verdict is JobVerdict.FINISHED


def test_only_a_sure_hardware_verdict_leaves_the_node():
    """A guess is retried here."""
    broken = attrs.evolve(CRASH, category="hardware", cause="gpu_fell_off_bus", action="exclude_node")
    assert decide([attrs.evolve(broken, confidence=0.9)], 3).exit_code == 76
    assert decide([attrs.evolve(broken, confidence=0.5)], 3).restarts


def test_where_there_are_nodes_to_spare_only_the_broken_one_leaves():
    """It alone ends with 76; one that has the store of the rendezvous cannot leave the others, and says so."""
    broken = attrs.evolve(
        CRASH, category="hardware", cause="gpu_fell_off_bus", action="exclude_node", confidence=0.9, spare_nodes=1
    )
    decision = decide([broken], 3)
    assert (decision.exit_code, decision.others_go_on, decision.ends_the_job) == (76, True, False)
    decision = decide([attrs.evolve(broken, holds_store=True)], 3)
    assert (decision.exit_code, decision.others_go_on, decision.ends_the_job) == (76, False, True)
    assert "store" in decision.reason


def test_where_there_are_nodes_to_spare_the_others_go_on_without_the_slow_one():
    """It costs them no restart, and an end for another reason stays what it is."""
    slow = attrs.evolve(FINISHED, stop_agreed=True, straggler="rank 3 is slow", straggler_is_here=False)
    assert decide([slow], 0).exit_code == 76
    spared = attrs.evolve(slow, spare_nodes=1)
    assert (decide([spared], 0).restarts, decide([spared], 0).reason) == (True, WITHOUT)
    assert decide([attrs.evolve(spared, straggler_is_here=True)], 0).others_go_on
    assert decide([attrs.evolve(spared, stop_agreed=False)], 0).verdict is JobVerdict.FINISHED
    assert decide([attrs.evolve(spared, ended_by=EndedBy.PREEMPTION)], 0).exit_code == 75


@given(st.lists(ends, min_size=1, max_size=4), ends.filter(lambda end: end.straggler is None), st.integers(0, 4))
def test_a_run_that_fails_for_ever_comes_to_an_end(history, failure, budget):
    """However it began, without a new checkpoint there are no more restarts than the budget has, and the free ones."""
    failure = attrs.evolve(failure, checkpoint_before=3, checkpoint_after=3)
    history = [*history, *[failure] * (budget + 1 + FREE_ENDINGS)]
    assert not decide(history, budget).restarts


HANG = AttemptEnd(0, EndedBy.HANG, {0: -15, 1: -9}, category="hang", cause="hang_rank_stuck", completed_a_step=True)
FREE = attrs.evolve(HANG, free=True)


@given(st.lists(ends, max_size=5), st.integers(1, 4))
def test_a_free_ending_costs_nothing(history, budget):
    """The budget is the same after it, and what would have gone on before it goes on after it."""
    assert failures_since_progress([*history, FREE]) <= failures_since_progress([*history, HANG])
    may_be_free = (EndedBy.HANG, EndedBy.SERVER)
    free_before = sum(end.free and (end.ended_by in may_be_free or end.cause == "port_in_use") for end in history)
    if free_before < FREE_ENDINGS and failures_since_progress(history) <= budget:
        decision = decide([*history, FREE], budget)
        assert decision.restarts
        assert decision.reason == FREE_RESTART
        assert decision.restarts_left == budget - failures_since_progress(history)


def test_at_most_three_endings_are_free_and_none_where_no_restart_is_allowed():
    """More than the monitor grants are counted; a user who allows no restart gets none."""
    left = [decide([FREE] * count, 3).restarts_left for count in range(1, 8)]
    assert left == [3, 3, 3, 2, 1, 0, 0]
    assert [decide([FREE] * count, 3).restarts for count in (6, 7)] == [True, False]
    assert decide([FREE] * 4, 3).reason == "restart 1 of 3"
    assert decide([FREE, HANG], 3).reason == "restart 1 of 3"
    assert "--max-restarts 0" in decide([FREE], 0).reason
    died = attrs.evolve(CRASH, free=True)
    assert decide([died], 3).reason == "restart 1 of 3", "only the end for a hang is free"


def test_what_the_launcher_itself_has_missed_costs_nothing_of_the_budget():
    """A port in use, a full disk: waited for, and no fault of the program; at most three times."""
    missed = attrs.evolve(CRASH, free=True, resource=Resource(PORT, "29500"))
    decision = decide([missed], 3)
    assert (decision.restarts, decision.reason, decision.restarts_left) == (True, FREE_OF_SERVER, 3)
    assert decision.waits_for == missed.resource
    assert decide([missed] * 4, 3).reason == "restart 1 of 3"
    assert decide([attrs.evolve(missed, free=False)], 3).reason == "restart 1 of 3"
    assert decide([USER_ERROR, USER_ERROR], 9).exit_code == 77
    assert decide([USER_ERROR, missed, USER_ERROR], 9).restarts, "not in a row"


def test_free_endings_in_the_start_up_do_not_stop_a_job():
    """Three attempts without a step are a program that does not get going, unless we ended them."""
    early = attrs.evolve(FREE, completed_a_step=False)
    assert decide([early] * 3, 3).restarts
    crash = attrs.evolve(CRASH, completed_a_step=False)
    assert decide([crash, early, crash, early], 3).restarts
    assert decide([crash, early, crash, early, crash], 9).exit_code == 77


def test_the_third_time_at_one_place_ends_the_job():
    """Stop, with the sentence that the monitor has for it; a person's wish and a broken node come first."""
    last = attrs.evolve(HANG, final="it hung at train.py:15 for the third time")
    decision = decide([FREE, HANG, last], 9)
    assert (decision.exit_code, decision.reason) == (77, "it hung at train.py:15 for the third time")
    assert decide([attrs.evolve(last, ended_by=EndedBy.INTERRUPT)], 9).exit_code == 130
    broken = {"category": "hardware", "cause": "gpu_fell_off_bus", "action": "exclude_node", "confidence": 0.9}
    assert decide([attrs.evolve(last, **broken)], 9).exit_code == 76


def test_a_job_that_stood_still_when_it_was_to_leave_failed():
    """1 and not 75, so that a retry counts; not where all ranks left by themselves, and 76 where the node is broken."""
    left = AttemptEnd(0, EndedBy.PREEMPTION, {0: -15, 1: -9}, stood="rank 1 made no progress", leaving="rank 1 ...")
    assert (decide([left], 3).exit_code, decide([left], 3).reason) == (1, "rank 1 ...")
    assert decide([attrs.evolve(left, ended_by=EndedBy.RANKS, exit_codes={0: 75, 1: -9})], 3).exit_code == 1
    assert decide([attrs.evolve(left, exit_codes={0: 75, 1: 0})], 3).exit_code == 75
    assert decide([attrs.evolve(left, stood=None)], 3).exit_code == 75
    broken = {"category": "hardware", "cause": "gpu_fell_off_bus", "action": "exclude_node", "confidence": 0.9}
    assert decide([attrs.evolve(left, **broken)], 3).exit_code == 76


def test_a_cause_that_lasts_has_a_budget_of_its_own_until_a_new_checkpoint():
    """After it somebody has to look, but not before an older checkpoint was tried; the rest has the job's budget."""
    crash = attrs.evolve(
        CRASH, cause="rank_segfault", category="process", confidence=0.9, checkpoint_before=5, checkpoint_after=5
    )
    assert decide([crash] * 3, 9).restarts  # the third retry passes over the checkpoint that two resumes failed after
    assert decide([crash] * 4, 9).verdict is JobVerdict.GIVE_UP
    assert "rank_segfault came 4 times" in decide([crash] * 4, 9).reason
    assert decide([*[crash] * 3, saved(crash, 5, 6)], 9).restarts
    assert decide([*[crash] * 3, saved(crash, 5, 6), *[crash] * 3], 9).verdict is JobVerdict.GIVE_UP
    bad = attrs.evolve(crash, cause="checkpoint_corrupt", category="checkpoint", action="rollback")
    assert decide([bad] * 4, 9).exit_code == 77
    for other in (
        {"confidence": 0.5},  # a guess
        {"cause": "rank_killed_sigkill"},  # transient
        {"checkpoint_before": None, "checkpoint_after": None},  # it saves by itself, if at all
    ):
        assert decide([attrs.evolve(crash, **other)] * 4, 9).restarts


def test_what_the_scheduler_ends_is_requeued_when_that_is_sure():
    """A rank that merely got SIGTERM from somebody is started again."""
    ended = attrs.evolve(CRASH, category="scheduler", cause="slurm_time_limit", action="requeue", confidence=0.9)
    assert decide([ended], 3).exit_code == 75
    assert decide([attrs.evolve(ended, cause="preemption_sigterm", confidence=0.6)], 3).restarts


def test_a_restart_waits_for_what_failed_and_an_end_for_nothing():
    """The resource that the error named goes along with the decision."""
    disk = Resource("storage", "/data/x")
    full = attrs.evolve(CRASH, category="storage", cause="storage_full", action="wait", resource=disk)
    assert decide([full], 3).waits_for == disk
    assert decide([full] * 4, 3).waits_for is None


def test_a_wrong_use_of_the_sdk_is_not_tried_again():
    """Its message has the cure, which no attempt brings about; one that trained for a while is another matter."""
    error = KnownError("resilience_sdk.errors.ConfigError", "leave the option out", None)
    wrong = attrs.evolve(USER_ERROR, error=error, completed_a_step=False)
    decision = decide([wrong], 3)
    assert (decision.verdict, decision.exit_code) == (JobVerdict.STOP, 77)
    assert decide([attrs.evolve(wrong, completed_a_step=True)], 3).verdict is JobVerdict.RESTART
    assert decide([attrs.evolve(wrong, error=ERROR)], 3).verdict is JobVerdict.RESTART


def test_a_lost_fork_server_costs_nothing_three_times():
    """No rank is at fault, so it is not of the budget; a server that is killed again and again is."""
    lost = AttemptEnd(0, EndedBy.SERVER, {0: -9, 1: -9}, cause="fork_server_lost", category="process", free=True)
    assert decide([lost], 3).reason == FREE_OF_SERVER
    assert [decide([lost] * count, 1).restarts for count in range(1, 6)] == [True, True, True, True, False]
    assert not decide([lost], 0).restarts


def test_ranks_that_aborted_when_they_were_done_have_finished():
    """Their codes are those that their scripts left with, and the reason says what came after."""
    decision = decide([attrs.evolve(FINISHED, aborted=(0, 1))], 3)
    assert (decision.verdict, decision.exit_code) == (JobVerdict.FINISHED, 0)
    assert decision.reason == "all ranks were done; ranks 0, 1 died by SIGABRT after that"


@pytest.mark.parametrize(("action", "verdict"), [(STOP, JobVerdict.STOP), (EXCLUDE_NODE, JobVerdict.HARDWARE)])
def test_what_a_rank_asks_for_counts_where_it_failed(action, verdict):
    """In the place of a restart, with its reason; not where all finished, or the job was asked to leave."""
    request = EndingRequest(action, "loss is broken")
    asked = attrs.evolve(CRASH, requested=request)
    assert decide([asked], 3).verdict is verdict
    assert "loss is broken" in decide([asked], 3).reason
    assert decide([attrs.evolve(FINISHED, requested=request)], 3).verdict is JobVerdict.FINISHED
    left = attrs.evolve(asked, ended_by=EndedBy.PREEMPTION)
    assert decide([left], 3).verdict is JobVerdict.PREEMPTED


def test_an_end_that_could_not_be_saved_ends_the_job_without_a_restart():
    """Be it raised or found at the exit; a rank that failed otherwise is started again."""
    request = EndingRequest(UNSAVED, "steps 40 to 59 ARE LOST", "make room")
    raised = KnownError("resilience_sdk.errors.NotSavedError", "steps", "train.py:3 main")
    for end in (
        attrs.evolve(FINISHED, requested=request),
        AttemptEnd(
            0, EndedBy.RANKS, {0: 1, 1: 1}, requested=request, error=raised, cause="storage_full", action="wait"
        ),
    ):
        decision = decide([end], 3)
        assert (decision.verdict, decision.exit_code) == (JobVerdict.GIVE_UP, 1)
        assert (decision.reason, decision.advice) == ("steps 40 to 59 ARE LOST", "make room")
    assert decide([attrs.evolve(CRASH, requested=request)], 3).restarts
    assert decide([attrs.evolve(FINISHED, requested=request, stop_agreed=True)], 3).verdict is JobVerdict.PREEMPTED


def test_where_no_checkpoint_is_good_the_advice_is_not_to_mend_the_program():
    """The error says what can be done."""
    bad = KnownError("resilience_sdk.errors.CheckpointError", "all 2 checkpoints are damaged", "train.py:3 main")
    end = attrs.evolve(CRASH, error=bad, category="checkpoint", cause="checkpoint_corrupt")
    decision = decide([end, end], 3)
    assert decision.verdict is JobVerdict.STOP
    assert "of the checkpoints" in (decision.advice or "")


def test_a_node_that_is_to_be_left_out_leaves_alone_where_the_others_can_go_on():
    """Nodes to spare go on without it, unless it has the store."""
    asked = attrs.evolve(CRASH, requested=EndingRequest(EXCLUDE_NODE, "bad memory"), spare_nodes=1)
    assert decide([asked], 3).others_go_on
    assert not decide([attrs.evolve(asked, holds_store=True)], 3).others_go_on
