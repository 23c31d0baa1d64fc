"""Megatron with pipeline stages, and as Megatron-LM runs it; the rest is in adapters_contract."""

from __future__ import annotations

import contextlib
import json

import pytest
from adapter_frameworks import require
from harness import PROJECT, job, steps_lost
from straggler_runs import enough, found_events, least_of
from to_the_end import output_of

EXAMPLE = PROJECT / "examples" / "megatron_on_cpu.py"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def megatron():
    """Megatron is here."""
    require("megatron.core", "megatron-core==0.16.1")


@pytest.mark.alone
def test_stages_are_not_compared_but_a_slow_rank_of_a_stage_is_named(tmp_path):
    """The second stage takes longer, which is its work; of its two ranks, 3 takes longer than 2."""
    fault = {"RESILIENCE_FAULT": "slow:rank=3,section=fwd,seconds=0.03"}
    least = least_of(0.02)  # a step of the second stage takes that much longer than one of the first
    with job(tmp_path, "--nproc-per-node", "4", "megatron_stages.py", env=fault) as run:
        run.wait(lambda: bool(found_events(run, least=least)), "a verdict")
        first = json.loads(run.told("step-0-0")[0].read_text())["step"]
        run.wait(lambda: json.loads(run.told("step-0-0")[0].read_text())["step"] > first + 24, "more steps")
        enough(run)
    found = found_events(run, least=least)
    assert {(tuple(event["ranks"]), event["section"]) for event in found} == {((3,), "fwd")}
    assert {event["role"] for event in found} == {"stage-1"}


# -- as Megatron-LM runs it

PREEMPTED_AT = 7
PREEMPTED = {"RESILIENCE_FAULT": f"preempt:rank=1,step={PREEMPTED_AT}"}


@contextlib.contextmanager
def pretraining(folder, *args, env=None):
    """Run `pretrain()` on two ranks."""
    folder.mkdir(exist_ok=True)
    with job(folder, "--nproc-per-node", "2", "megatron_lm.py", *map(str, args), env=env or {}) as run:
        yield run


def told(run, name):
    """Return what each rank has told under that name."""
    return [json.loads(path.read_text()) for path in run.told(name)]


def test_pretrain_is_watched_from_within_and_left_as_it_was(tmp_path):
    """A beat per iteration, sections by its timers, and afterwards its own timers, handler and client are back."""
    with pretraining(tmp_path, "--train-iters", 6, "--eval-interval", 3, "--exit-signal-handler") as run:
        assert run.finish(90.0) == 0, run.screen
    assert run.incidents() == []
    assert (run.run_dir / "finished").exists()
    assert len(told(run, "end-0-[01]")) == 2
    for end in told(run, "end-0-[01]"):
        assert (end["beats"], end["open"], end["done"]) == (6, [], True)
        passes = end["sections"]
        assert [passes[name] for name in ("fwd", "bwd", "optim", "data", "eval", "finalize")] == [6, 6, 6, 6, 2, 8]
        assert end["forwards"] == 8
        assert end["traces"] == ["Timers", "LocalSignalHandler", "NoneType"]


def test_asked_to_leave_pretrain_saves_by_its_own_means_on_all_ranks(tmp_path):
    """Only rank 1 gets the signal; both save after the same iteration and leave with 75; the next start goes on."""
    save = tmp_path / "megatron"
    asked = ("--save", save, "--exit-signal-handler")
    with pretraining(tmp_path, "--train-iters", 100_000, *asked, env=PREEMPTED) as run:
        assert run.finish(90.0) == 75, run.screen
    left = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert [each["step"] for each in told(run, "step-0-[01]")] == [left, left]
    assert left > PREEMPTED_AT
    assert [incident["kind"] for incident in run.incidents()] == ["preemption"]
    with pretraining(tmp_path, "--train-iters", left + 2, *asked) as run:
        assert run.finish(90.0) == 0, run.screen
    assert [each["step"] for each in told(run, "start-0-[01]")] == [left, left]
    assert (run.run_dir / "finished").exists()


def test_the_stop_needs_no_option_of_megatron(tmp_path):
    """Without --exit-signal-handler, and without --save: both leave behind the same iteration, which is said."""
    with pretraining(tmp_path, "--train-iters", 100_000, env=PREEMPTED) as run:
        assert run.finish(90.0) == 75, run.screen
    [first, second] = [each["step"] for each in told(run, "step-0-[01]")]
    assert first == second > PREEMPTED_AT
    assert "without --save nothing is saved" in run.screen


@pytest.mark.release
def test_an_early_exit_is_not_finished(tmp_path):
    """--exit-interval leaves with 0 before the last iteration: no finished flag, to be requeued, and told as planned.

    What Megatron has saved on its way out is told too.
    """
    with pretraining(tmp_path, "--train-iters", 9, "--exit-interval", 6, "--save", tmp_path / "megatron") as run:
        assert run.finish(90.0) == 75, run.screen
    assert not (run.run_dir / "finished").exists()
    assert "after iteration 6 of 9" in run.screen
    [incident] = run.incidents()
    assert (incident["kind"], incident["cause"], incident["action"]) == ("preemption", "planned_exit", "requeue")
    told_by = {piece["source"]: piece["text"] for piece in incident["evidence"]}
    assert told_by["notice"] == "Megatron-LM itself, as planned: --exit-interval 6 after iteration 6 of 9"
    assert "Megatron-LM its own after 6 steps" in told_by["checkpoint"]
    assert "the SDK saved nothing" not in run.screen


@pytest.mark.parametrize("shape", [(), pytest.param(("--older",), marks=pytest.mark.release)], ids=["newest", "older"])
def test_the_load_of_a_checkpoint_is_heard(tmp_path, shape):
    """A signal in it is not lost to Megatron's own handler; a hang in it is named, and the next attempt goes on.

    The newest Megatron-LM loads before it calls anything of the script.
    """
    place = (*shape, "--save", tmp_path / "megatron", "--exit-signal-handler")
    with pretraining(tmp_path, "--train-iters", 100_000, *place, "--asked-early") as run:
        assert run.finish(90.0) == 75, run.screen
    [first, second] = [each["step"] for each in told(run, "step-0-[01]")]
    assert first == second <= 100
    [stop] = run.incidents()
    assert (stop["cause"], stop["lost_steps"]) == ("preemption_sigterm", 0)
    assert f"Megatron-LM's own newest checkpoint is after {first} step" in run.screen
    stuck = {"RESILIENCE_FAULT": "hang:rank=1,section=resume,how=c", "RESILIENCE_SECTION_TIMEOUTS": "resume:5"}
    with pretraining(tmp_path, "--train-iters", first + 2, *place, env=stuck) as run:
        assert run.finish(90.0) == 0, run.screen
    [_, hang] = run.incidents()
    assert [(culprit["rank"], culprit["section"]) for culprit in hang["culprits"]] == [(1, "resume")]
    assert [each["step"] for each in told(run, "start-1-[01]")] == [first, first]
    assert [each["sections"]["resume"] for each in told(run, "end-1-[01]")] == [1, 1]


def test_nvrx_that_is_missing_is_said_with_a_cure_and_not_tried_again(tmp_path):
    """--enable-ft-package imports it."""
    with pretraining(tmp_path, "--train-iters", 9, "--enable-ft-package") as run:
        assert run.finish(90.0) not in (0, 75), run.screen
    assert "starting the ranks again" not in run.screen
    assert "leave the option out" in run.screen
    assert [incident["cause"] for incident in run.incidents()] == ["user_config_error"]


@pytest.mark.release
def test_nvrx_that_is_provided_is_ours(tmp_path):
    """Its client is watched as one of the SDK, beside the adapter; nothing asks to leave the option out."""
    words = ("--provide-nvrx", "--nproc-per-node", "2", "megatron_lm.py", "--train-iters", "9", "--enable-ft-package")
    with job(tmp_path, *words, "--save", str(tmp_path / "saves")) as run:
        assert run.finish(90.0) == 0, run.screen
    assert "leave the option out" not in run.screen
    assert run.incidents() == []


@pytest.mark.release
def test_exit_code_16_asks_for_another_node(tmp_path):
    """The result came again on the same GPU: requeued elsewhere, not restarted here."""
    with pretraining(tmp_path, "--train-iters", 9, "--reject-at", 3) as run:
        assert run.finish(90.0) == 76, run.screen
    [incident] = run.incidents()
    assert (incident["cause"], incident["action"]) == ("gpu_hardware_faulty", "exclude_node")
    assert any("computed on another one" in piece["text"] for piece in incident["evidence"])


# -- the example


def test_the_example_goes_on_after_a_crash(tmp_path):
    """Under `resilience run`, on two ranks: killed at step 27, it goes on at 20, and finishes."""
    fault = {"RESILIENCE_FAULT": "kill:rank=1,step=27"}
    with job(tmp_path, "--nproc-per-node", "2", EXAMPLE, "--steps", "40", env=fault) as run:
        assert run.finish(90.0) == 0, run.screen
    [incident] = run.incidents()
    assert incident["kind"] == "crash"
    assert incident["lost_steps"] in steps_lost(27, 20)
    assert "rank 1 finished after step 40" in run.out
    assert (run.run_dir / "finished").exists()


@pytest.mark.release
def test_the_example_runs_under_torchrun(tmp_path):
    """And finishes there, too."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    output = output_of(tmp_path, *launcher, EXAMPLE, "--steps", 4, RESILIENCE_RUN_DIR=str(tmp_path / "run"))
    assert "rank 0 finished after step 4" in output
