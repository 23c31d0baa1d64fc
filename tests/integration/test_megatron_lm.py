"""Megatron-LM itself: its own `pretrain()` on CPU, by a stand-in for CUDA. Without a source of it all is skipped.

`MEGATRON_LM=<directory>` names one: a checkout of Megatron-LM, or an unpacked wheel of megatron-core 0.19 or newer,
which has `megatron/training` too. Where such a release is installed, nothing has to be named.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from adapter_frameworks import is_here
from harness import PROJECT, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

CHECKOUT = "MEGATRON_LM"
GPT = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 4 --lr 0.01 --clip-grad 0 --override-opt_param-scheduler
    --mock-data --tokenizer-type NullTokenizer --vocab-size 31 --num-workers 0 --eval-iters 1
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization --disable-jit-fuser
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion
"""


@pytest.fixture(autouse=True)
def source():
    """Megatron-LM is here."""
    named = os.environ.get(CHECKOUT)
    if not named and not is_here("megatron.training"):
        pytest.skip(f"megatron.training is not installed, and {CHECKOUT} names no checkout of Megatron-LM")
    if named and not (Path(named) / "megatron" / "training").is_dir():
        pytest.fail(f"{CHECKOUT}={named} has no megatron/training")


@contextlib.contextmanager
def pretraining(folder, *words, options=(), env=None):
    """Run `pretrain()` on two ranks, with these words of Megatron-LM's; `options` are those of `resilience run`."""
    folder.mkdir(exist_ok=True)
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get(CHECKOUT)))), **(env or {})}
    words = (*options, "--nproc-per-node", "2", "megatron_lm_main.py", *GPT.split(), *map(str, words))
    with job(folder, *words, env=own) as run:
        yield run


def told(run, name):
    """Return what each rank has told under that name."""
    return [json.loads(path.read_text()) for path in run.told(name)]


def saved_after(place):
    """Return the iteration of Megatron's newest checkpoint."""
    return int((place / "latest_checkpointed_iteration.txt").read_text())


def test_pretrain_is_watched_from_within_and_left_as_it_was(tmp_path):
    """A beat per iteration, sections by its timers, and afterwards its own timers, handler and client are back.

    It evaluates twice on its way, and behind it on the validation and on the test data.
    """
    with pretraining(tmp_path, "--train-iters", 6, "--eval-interval", 3, "--exit-signal-handler") as run:
        assert run.finish() == 0, run.screen
    assert run.incidents() == []
    assert (run.run_dir / "finished").exists()
    assert len(told(run, "end-0-[01]")) == 2
    for end in told(run, "end-0-[01]"):
        assert (end["beats"], end["evaluation_beats"], end["open"], end["done"]) == (6, 4, [], True)
        passes = end["sections"]
        assert [passes[name] for name in ("fwd", "bwd", "optim", "data", "eval")] == [6, 6, 6, 6, 4]
        assert passes["finalize"] == 6 + 2  # before each step, behind the loop and in the end
        assert end["traces"] == ["Timers", "DistributedSignalHandler", "NoneType"]


@pytest.mark.release
def test_asked_to_leave_it_saves_by_its_own_means_and_goes_on_there(tmp_path):
    """Only rank 1 gets the signal; both leave with 75 behind the same iteration, of which the next start is told."""
    save = tmp_path / "megatron"
    place = ("--save", save, "--load", save, "--save-interval", 1000, "--eval-interval", 5000)
    fault = {"RESILIENCE_FAULT": "preempt:rank=1,step=7"}
    with pretraining(tmp_path, "--train-iters", 5000, *place, env=fault) as run:
        assert run.finish() == 75, run.screen
    left = saved_after(save)
    assert left > 7
    assert [end["step"] for end in told(run, "end-0-[01]")] == [left, left]
    [incident] = run.incidents()
    assert (incident["kind"], incident["lost_steps"]) == ("preemption", 0)
    assert not (run.run_dir / "finished").exists()
    with pretraining(tmp_path, "--train-iters", left + 2, *place) as run:
        assert run.finish() == 0, run.screen
    assert [start["step"] for start in told(run, "start-0-[01]")] == [left, left]
    for end in told(run, "end-0-[01]"):
        assert (end["step"], end["beats"], end["sections"]["resume"]) == (left + 2, 2, 1)
        assert end["sections"]["checkpoint"] == 1  # behind the last iteration
    assert (run.run_dir / "finished").exists()


@pytest.mark.release
def test_a_hang_is_named_and_the_job_goes_on_from_its_checkpoint(tmp_path):
    """Rank 1 hangs in a forward of iteration 7; both start again behind iteration 5, and finish."""
    save = tmp_path / "megatron"
    place = ("--save", save, "--load", save, "--save-interval", 5, "--eval-interval", 1000)
    options = ("--timeout-floor", "3", "--heartbeat-timeout", "5")
    fault = {"RESILIENCE_FAULT": "hang:rank=1,step=7,section=fwd,how=c"}
    with pretraining(tmp_path, "--train-iters", 10, *place, options=options, env=fault) as run:
        assert run.finish() == 0, run.screen
    [incident] = run.incidents()
    assert (incident["kind"], incident["action"]) == ("hang", "restart")
    [culprit] = incident["culprits"]
    assert (culprit["rank"], culprit["step"], culprit["section"]) == (1, 7, "fwd")
    assert [start["step"] for start in told(run, "start-1-[01]")] == [5, 5]
    assert saved_after(save) == 10
    assert (run.run_dir / "finished").exists()


@pytest.mark.release
def test_a_resume_repeats_every_iteration(tmp_path):
    """Tokens, losses with dropout, generators of the CPU, as without the SDK; what is not repeated is said."""
    words = ("--train-iters", 8, "--save-interval", 3, "--eval-interval", 2)

    def trained(name, *others, env=None):
        folder = tmp_path / name
        place = ("--save", folder / "megatron", "--load", folder / "megatron", "--record", folder / "record")
        with pretraining(folder, *words, *place, *others, env=env) as run:
            assert run.finish() == 0, run.screen
        lines = [(folder / f"record.{rank}").read_text().splitlines() for rank in range(2)]
        return [dict(map(json.loads, each)) for each in lines], run

    alone, _ = trained("alone", "--alone")
    cut, run = trained("cut", env={"RESILIENCE_FAULT": "kill:rank=1,step=5"})
    assert [start["step"] for start in told(run, "start-1-[01]")] == [3, 3]
    assert [list(each) for each in alone] == [list(range(8))] * 2
    assert cut == alone
    # Not called exact: what it has said to be lost may come later.
    assert "2 of 2 repeated steps equal, their losses, too; this resume does not repeat random numbers" in run.screen
    assert "resume_not_exact" not in run.screen
    assert {event["limit"] for event in run.events("resume_limit")} == {"megatron random numbers of ranks"}


_CURE = "let samplers draw by args.consumed_train_samples"
_GENERATORS = ("generators", "random number generators in another state; let nothing seed a generator behind the load")
PROVEN = {
    "good": (None, "resume exact: 3 of 3 repeated steps equal"),
    "order": ("samples", f"step 5: other samples; {_CURE}"),
    "batch": ("samples", f"step 6: other samples; {_CURE}"),
    "shard": ("samples", f"step 5: other samples; {_CURE}"),
    "rate": ("learning rate", "let Megatron's OptimizerParamScheduler set the rates"),
    "seeded": _GENERATORS,
    "cyclic": _GENERATORS,
    "augmented": (None, "3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "external": (None, "3 of 3 repeated steps equal, their losses, too; this resume does not repeat the place"),
    "external random": (None, "have other values of samples that are not known"),
    "batch size": (None, "a step has other batches, or the loader other data, than in the first pass"),
}


@pytest.mark.release
@pytest.mark.parametrize("kind", PROVEN)
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, kind):
    """Killed in iteration 8, resumed behind the fifth: three are done twice."""
    component, line = PROVEN[kind]
    save = tmp_path / "megatron"
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get(CHECKOUT))))}
    own["RESILIENCE_FAULT"] = "kill:rank=0,step=8"
    words = ("--train-iters", "16", "--save-interval", "5", "--eval-interval", "1000", "--save", str(save))
    command = ("--max-restarts", "1", "repeated_pretrain.py", kind, *GPT.split(), *words, "--load", str(save))
    with job(tmp_path, *command, env=own) as run:
        assert run.finish() == 0, run.screen
        assert ("resume_not_exact" in run.screen) is (component is not None), run.screen
        checks = [*run.events("resume_check"), *run.events("resume_not_exact")]
        assert [event["component"] for event in checks if event["component"]] == [component] * (component is not None)
        told = [f"{event['text']}; {event['cure']}" for event in checks]
        assert line in run.screen or any(line in one for one in told), (run.screen, told)
        assert [incident["kind"] for incident in run.incidents()] == ["crash"]


@pytest.mark.release
def test_a_loss_that_is_no_number_is_named(tmp_path):
    """Megatron is told not to look: the incident has the rank and the iteration, and the training goes on."""
    words = ("--train-iters", 8, "--eval-interval", 1000, "--nan-at", 4, "--no-check-for-nan-in-loss-and-grad")
    with pretraining(tmp_path, *words) as run:
        assert run.finish() == 0, run.screen
    [incident] = run.incidents()
    assert (incident["kind"], incident["cause"]) == ("numerics", "nan_loss")
    assert [(culprit["rank"], culprit["step"]) for culprit in incident["culprits"]] == [(1, 4)]


@pytest.mark.release
def test_a_result_that_is_rejected_twice_on_one_device_asks_for_another_node(tmp_path):
    """Megatron computes the iteration again, gets NaN again, saves and leaves with 16: requeued, not restarted here."""
    save = tmp_path / "megatron"
    place = ("--save", save, "--save-interval", 1000, "--eval-interval", 1000)
    with pretraining(tmp_path, "--train-iters", 8, *place, "--nan-at", 4) as run:
        assert run.finish() == 76, run.screen
    [incident] = run.incidents()
    assert (incident["cause"], incident["action"]) == ("gpu_hardware_faulty", "exclude_node")
    assert saved_after(save) == 4


@pytest.mark.release
def test_nvrx_that_is_provided_is_the_sdk(tmp_path):
    """`--enable-ft-package` finds its client, which is ours: sections, and timeouts that it calculates and keeps."""
    save = tmp_path / "megatron"
    words = ("--train-iters", 24, "--eval-interval", 1000, "--save", save, "--save-interval", 10)
    asked = ("--enable-ft-package", "--calc-ft-timeouts", "--ft-num-warmup-iters", 2)
    with pretraining(tmp_path, *words, *asked, options=("--provide-nvrx",)) as run:
        assert run.finish() == 0, run.screen
    assert run.incidents() == []
    assert "leave the option out" not in run.screen
    for end in told(run, "end-0-[01]"):
        passes = end["sections"]
        assert (passes["setup"], passes["step"]) == (1, 24 - 2)
        assert passes["checkpointing"] == 24 + 3 + 2  # before each step; each save; behind the loop and in the end
    kept = json.loads((save / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert kept["calculated_sections"] == ["checkpointing", "step"]


@pytest.mark.release
def test_nvrx_that_is_missing_is_said_with_a_cure_and_not_tried_again(tmp_path):
    """Megatron-LM imports it before it does anything else."""
    with pretraining(tmp_path, "--train-iters", 9, "--eval-interval", 1000, "--enable-ft-package") as run:
        assert run.finish() == 77, run.screen
    assert "leave the option out" in run.screen
    assert [incident["cause"] for incident in run.incidents()] == ["user_config_error"]
