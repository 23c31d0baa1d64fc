"""Every adapter does the same: README.md of this folder says what, and how an adapter takes part."""

from __future__ import annotations

import json
import re

import pytest
from adapter_frameworks import require
from harness import steps_lost
from straggler_runs import least_of, named
from to_the_end import ended, output_of

from .table import ADAPTERS

pytestmark = pytest.mark.slow

STEPS, MICRO_BATCHES = 12, 2
SAVE, KILLED_AT, HUNG_AT, ASKED_AT = 5, 7, 9, 14
EARLY_STEPS = 5_000  # of a millisecond: far from FOREVER, and more than what agreeing takes on a busy machine
FOREVER = 100_000  # steps: the stop ends it
FAULTS = (
    f"kill:rank=1,step={KILLED_AT};"
    "hang:rank=0,step={hung},attempt=1,section={forward};"
    f"preempt:rank=1,step={ASKED_AT},attempt=2"
)
HANG_S = 5.0
SLOW_S = 0.05
SAVE_OFTEN, KERNELS_EVERY_S = 3, 0.001
NAN_AT, EVALUATED_EVERY, EVALUATION = 7, 4, 3  # batches
RAISES_AT = 60
TRACKED = "tracked-run-7"  # of the script


def end_of(folder, adapter, *args, imports=False, **env):
    """Run the adapter's script on two ranks to its end; they find its framework imported unless told to do so."""
    framework = None if imports else adapter.name
    return ended(folder, f"adapter_{adapter.name}.py", *args, framework=framework, **env)


FULL = "pytorch"  # the adapter that every day goes through all scenarios


def of_release(*adapters):
    """Mark these adapters' tests for the lane `release`, but for the one that goes through all scenarios every day."""
    marks = {adapter: () if adapter.name == FULL else (pytest.mark.release,) for adapter in adapters}
    return [pytest.param(adapter, marks=marks[adapter], id=adapter.name) for adapter in adapters]


in_full = pytest.mark.parametrize("adapter", of_release(*ADAPTERS), indirect=True, scope="module")


@pytest.fixture(scope="module", params=ADAPTERS, ids=lambda adapter: adapter.name)
def adapter(request):
    """Each adapter of the table; a missing framework skips, or fails where it is asked for."""
    require(request.param.module, request.param.package)
    return request.param


@pytest.fixture(scope="module")
def folder(adapter, tmp_path_factory):
    return tmp_path_factory.mktemp(adapter.name)


@pytest.fixture(scope="module")
def clean(adapter, folder):
    """A training that nothing happens to, whose ranks import their framework as those of users do."""
    return end_of(folder / "clean", adapter, "--steps", STEPS, "--accumulate", MICRO_BATCHES, imports=True)


@pytest.fixture(scope="module")
def disabled(adapter, folder):
    """The same with the SDK switched off."""
    args = ("--steps", STEPS, "--accumulate", MICRO_BATCHES)
    return end_of(folder / "disabled", adapter, *args, RESILIENCE_DISABLE="1")


@pytest.fixture(scope="module")
def faulted(adapter, folder):
    """A training that is killed, then hangs, then is asked to leave."""
    faults = FAULTS.format(hung=HUNG_AT, forward=adapter.forward)
    return end_of(
        folder / "faults",
        adapter,
        *("--steps", FOREVER, "--save", SAVE),
        RESILIENCE_FAULT=faults,
        RESILIENCE_HEARTBEAT_TIMEOUT=str(HANG_S),
    )


@pytest.fixture(scope="module")
def resumed(adapter, folder, faulted):
    """The same command once more, with three steps to go."""
    left = faulted.told("step", attempt=2)[0]["step"]
    for path in faulted.run.told("*"):
        path.unlink()
    return left, end_of(folder / "faults", adapter, "--steps", left + 3, "--save", SAVE)


@pytest.fixture(scope="module")
def slow(adapter, folder):
    """Rank 1 is slow in its forward; in the end all ranks raise there."""
    return end_of(
        folder / "slow",
        adapter,
        *("--steps", FOREVER, "--raise-at", RAISES_AT),
        RESILIENCE_FAULT=f"slow:rank=1,section={adapter.forward},seconds={SLOW_S}",
    )


@pytest.fixture(scope="module")
def asked_early(adapter, folder):
    """Rank 1 is asked to leave before the first step."""
    return end_of(folder / "early", adapter, "--steps", FOREVER, "--save", FOREVER, "--asked-early")


@pytest.fixture(scope="module")
def bad(adapter, folder):
    """The loss of rank 1 is NaN in one step; the training is evaluated every so many steps, and has kernels timed."""
    args = ("--steps", STEPS, "--nan-at", NAN_AT, "--evaluate", EVALUATED_EVERY, "--kernels")
    return end_of(folder / "bad", adapter, *args, RESILIENCE_KERNELS_EVERY=str(KERNELS_EVERY_S))


@pytest.fixture(scope="module")
def rolled_back(adapter, folder):
    """The same, where the way back is asked for."""
    args = ("--steps", STEPS, "--nan-at", NAN_AT, "--save", SAVE)
    return end_of(folder / "back", adapter, *args, RESILIENCE_NUMERICS="rollback")


@pytest.fixture(scope="module")
def background(adapter, folder):
    """The training of `clean`, saved in the background, killed once, in which a tracker has a run."""
    args = ("--steps", STEPS, "--accumulate", MICRO_BATCHES, "--save", SAVE_OFTEN, "--background")
    return end_of(folder / "background", adapter, *args, RESILIENCE_FAULT=f"kill:rank=1,step={KILLED_AT}")


# -- a training that nothing happens to


def test_it_finishes(clean):
    """Exit code 0, the finished flag, and nothing to report."""
    assert clean.code == 0, clean.screen
    assert (clean.run.run_dir / "finished").exists()
    assert clean.run.incidents() == []


def test_its_start_up_is_declared(clean):
    """Before the first step the page promises one, so that a rank which gets stuck until then is told."""
    assert clean.told("prepared") == [{"declared": True}] * 2


def test_each_optimizer_step_is_one_heartbeat(clean):
    """Not each micro-batch."""
    ends = clean.told("end")
    assert [end["step"] for end in ends] == [STEPS, STEPS]
    assert [end["beats"] for end in ends] == [STEPS, STEPS]


def test_sections_are_named_and_closed(adapter, clean):
    """Forward and backward once per micro-batch, the optimizer once per step, and the wait for data."""
    for end in clean.told("end"):
        sections = end["sections"]
        assert sections[adapter.forward] == sections[adapter.backward] == STEPS * MICRO_BATCHES
        assert sections[adapter.optimizer] == STEPS
        assert sections[adapter.data] >= STEPS
        assert end["open"] == []


def test_deadlines_end_with_the_loop(clean):
    """What follows may take any time."""
    assert [end["done"] for end in clean.told("end")] == [True, True]


def test_a_second_use_is_an_error_with_a_cure(clean):
    """It names what is there already, and says what to do."""
    for end in clean.told("end"):
        assert re.match(r"ConfigError: .*(detach|remove|only one|call )", end["second"]), end["second"]


def test_detached_it_leaves_the_framework_as_it_was(clean):
    """No hook, no wrapper, no other class."""
    for end in clean.told("end"):
        assert end["before"]
        assert end["after"] == end["before"]


# -- switched off


def test_switched_off_it_does_nothing(clean, disabled):
    """The training ends as well, with the very same weights, and has recorded nothing."""
    assert disabled.code == 0, disabled.screen
    assert "switched off" in disabled.screen
    for end in disabled.told("end"):
        assert end["beats"] == 0
        assert end["after"] == end["before"]
    assert {end["digest"] for end in disabled.told("end") + clean.told("end")} == {clean.told("end")[0]["digest"]}


# -- killed, hung, asked to leave


def test_a_killed_rank_is_named(faulted):
    """The step is that of the training, not of the attempt."""
    first = faulted.run.incidents()[0]
    assert (first["kind"], [(c["rank"], c["step"]) for c in first["culprits"]]) == ("crash", [(1, KILLED_AT)])


def test_it_resumes_after_a_fault(faulted):
    """From the newest checkpoint, on both ranks; so two steps were lost."""
    assert [each["step"] for each in faulted.told("start", attempt=1)] == [SAVE, SAVE]
    assert [each["step"] for each in faulted.told("start", attempt=2)] == [SAVE, SAVE]
    assert faulted.run.incidents()[0]["lost_steps"] in steps_lost(KILLED_AT, SAVE)


def test_a_hang_is_named_with_its_section(adapter, faulted):
    """The rank that hangs, not the one that waits for it; the step, and where in it."""
    [hang] = [incident for incident in faulted.run.incidents() if incident["kind"] == "hang"]
    [culprit] = hang["culprits"]
    assert (culprit["rank"], culprit["step"], culprit["section"]) == (0, HUNG_AT, adapter.forward)


def test_asked_to_leave_all_ranks_stop_behind_one_step(faulted):
    """The signal reached one rank only. Both saved, and nothing is lost."""
    assert faulted.code == 75, faulted.screen
    left = [each["step"] for each in faulted.told("step", attempt=2)]
    assert left[0] == left[1] > ASKED_AT
    last = faulted.run.incidents()[-1]
    assert (last["kind"], last["lost_steps"], last["culprits"]) == ("preemption", 0, [])


def test_it_goes_on_where_it_stopped(resumed):
    """The next start of the same command makes the very next step, and finishes."""
    left, ended = resumed
    assert ended.code == 0, ended.screen
    assert [each["step"] for each in ended.told("start")] == [left, left]
    assert [each["step"] for each in ended.told("end")] == [left + 3, left + 3]
    assert (ended.run.run_dir / "finished").exists()


@in_full
def test_asked_to_leave_before_the_first_step(adapter, asked_early):
    """The signal is heard: both ranks stop behind the same one of the first steps, saved, without a restart."""
    assert asked_early.code == 75, asked_early.screen
    left = [each["step"] for each in asked_early.told("step")]
    assert left[0] == left[1] <= EARLY_STEPS
    assert [incident["kind"] for incident in asked_early.run.incidents()] == ["preemption"]
    assert asked_early.told("asked", attempt=1) == []


# -- slow, and an exception


@in_full
def test_a_straggler_is_named_with_its_section(adapter, slow):
    """The slow rank, though both take equally long for a step."""
    found = named(slow.run, least=least_of(SLOW_S))
    assert ((1,), adapter.forward) in found
    assert {ranks for ranks, _ in found} == {(1,)}


@in_full
def test_the_shares_of_a_step_are_told(adapter, slow):
    """By the monitor, of the loop's own sections."""
    shares = {each["name"]: each["share"] for each in slow.run.events("step_time")[-1]["sections"]}
    assert all(0.0 < shares[name] < 1.0 for name in (adapter.forward, adapter.backward, adapter.optimizer))


@in_full
def test_an_exception_of_the_step_leaves_nothing_open(adapter, slow):
    """It reaches the script as it is, and no section or heartbeat stays behind it."""
    assert slow.code == 0, slow.screen
    for end in slow.told("end"):
        assert end["caught"] == "this batch is bad"
        assert end["open"] == []
        assert end["step"] == end["beats"] == RAISES_AT


# -- bad numbers, and an evaluation


def test_a_nan_of_one_rank_is_named_with_no_line_for_it(bad):
    """The rank and the step, though both ranks have bad weights from then on; the training goes on."""
    assert bad.code == 0, bad.screen
    [incident] = bad.run.incidents()
    assert (incident["kind"], incident["cause"], incident["action"]) == ("numerics", "nan_loss", "none")
    assert [(culprit["rank"], culprit["step"]) for culprit in incident["culprits"]] == [(1, NAN_AT)]


def test_each_batch_of_an_evaluation_is_a_heartbeat_and_no_step(bad):
    """A long evaluation shows that it moves, and steps are counted as ever. One before the first step is start-up."""
    for end in bad.told("end"):
        assert end["evaluation_beats"] == STEPS // EVALUATED_EVERY * EVALUATION <= end["evaluated"]
        assert end["beats"] == STEPS
        assert end["open"] == []


def test_kernels_are_timed_by_the_setting(bad):
    """On each rank, for the scores of its GPU, by the profiler and the files of a real job."""
    assert all(end["kernels"] for end in bad.told("end"))


@in_full
def test_the_way_back_leads_before_the_bad_step(adapter, rolled_back):
    """All ranks go on from the checkpoint before it, with good weights, and leave its batch out."""
    assert rolled_back.code == 0, rolled_back.screen
    [incident] = rolled_back.run.incidents()
    assert (incident["kind"], incident["action"]) == ("numerics", "rollback")
    assert [(culprit["rank"], culprit["step"]) for culprit in incident["culprits"]] == [(1, NAN_AT)]
    assert [each["step"] for each in rolled_back.told("start", attempt=1)] == [SAVE, SAVE]
    for end in rolled_back.told("end", attempt=1):
        assert end["finite"]
        assert end["forwards"] == STEPS - SAVE - 1


# -- saved in the background


def test_a_save_in_the_background_is_as_good_as_any(adapter, clean, background):
    """What was killed goes on at the very batch: the weights end equal bit for bit to those of `clean`."""
    assert background.code == 0, background.screen
    [first, other] = background.told("start", attempt=1)
    assert first["step"] == other["step"] in range(SAVE_OFTEN, KILLED_AT)
    assert {end["digest"] for end in background.told("end", attempt=1) + clean.told("end")} == {
        clean.told("end")[0]["digest"]
    }
    commits = background.run.events("ckpt_commit")
    assert any(event["stall_s"] < event["seconds"] for event in commits) is adapter.saves_in_background


def test_its_resume_is_declared_and_its_tracker_goes_on(background):
    """What loads is a section, so that its time is told; the run of a tracker is that of before."""
    assert all(end["sections"]["resume"] for end in background.told("end", attempt=1))
    assert [told["run"] for told in background.told("tracker")] == [None, None]
    assert background.told("tracker", attempt=1)[0]["run"] == TRACKED


def test_its_time_is_accounted_for(background):
    """Each second is in one bucket, the start-up in its own; what was killed is a fault, and its steps are lost."""
    account = json.loads(
        output_of(background.run.folder, "-m", "resilience_sdk", "goodput", background.run.run_dir, "--json")
    )
    assert sum(account["buckets"].values()) == pytest.approx(account["wall_s"], rel=0.01)
    assert (account["faults"], account["injected"], account["mttf_s"]) == (0, 1, None)  # nothing failed by itself
    assert account["lost_steps"] in range(1, KILLED_AT - SAVE_OFTEN + 2)
    assert account["buckets"]["startup"] > 0.0
