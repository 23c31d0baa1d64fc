"""What is said of a job that differs from the undisturbed one: the first component, and the cure of its way in."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from planted_runs import PLANTED, attempt, of_look, run

from resilience_sdk.rank.rehearsal import RehearsedRank, Weight
from resilience_sdk.rehearse import cures
from resilience_sdk.rehearse.ends import judge_end, own_variation, variation_words
from resilience_sdk.rehearse.judge import FAIL, PASS, SKIPPED, PromiseResult
from resilience_sdk.rehearse.plan import Baseline, JobFacts, learn

END, OTHER = (Weight(1.0, 0.5),), (Weight(1.2, 0.5),)


def job(traces: tuple[RehearsedRank, ...], weights: tuple[Weight, ...] = END, **facts: Any) -> JobFacts:
    """Return what a job of these traces has left."""
    return JobFacts((0,), 5.0, (tuple(attrs.evolve(one, weights=weights, **facts) for one in traces),), (), ())


UNDISTURBED = job(run())
BASELINE: Baseline = learn(UNDISTURBED, 2)


def judged(facts: JobFacts, again: JobFacts | None = UNDISTURBED) -> PromiseResult:
    """Return what came of the end."""
    found = judge_end("kill", BASELINE, facts, again)
    assert found is not None
    return found


def planted(name: str, *ranks: int) -> tuple[RehearsedRank, ...]:
    """Return the traces of an attempt that differs in this from step 12 on."""
    return tuple(PLANTED[name](one, 12) if one.rank in ranks else one for one in run(first=10))


@pytest.mark.parametrize("name", ["samples", "learning rate", "weights", "loss", "gradients"])
def test_what_differs_first_fails_only_beside_two_runs_that_are_alike(name: str) -> None:
    """Another undisturbed run is asked for; the component, its step and ranks are said and in the JSON."""
    facts = job(planted(name, 1), OTHER)
    assert judge_end("kill", BASELINE, facts, None) is None
    told = judged(facts)
    assert (told.result, told.step, told.ranks) == (FAIL, 12, (1,))
    assert told.component in {name, "loss"}
    assert told.why.startswith("step 12, rank 1: ")
    assert (told.cure or "").endswith("on every rank what is its own")


def test_equal_steps_pass_without_another_run() -> None:
    """What was compared is said."""
    told = judged(job(run(first=10)), None)
    assert told.result == PASS
    assert told.why.startswith("the same weights; 10 steps compared: samples, learning rate, weights")


@pytest.mark.parametrize("name", ["generators of torch", "values of the samples"])
def test_what_nothing_follows_from_is_a_note(name: str) -> None:
    """A generator that nobody draws from may be another; beside other weights, it is what they follow from."""
    told = judged(job(planted(name, 0, 1)), None)
    assert told.result == PASS
    assert f"{name} differ from step 12 on, and nothing follows" in told.why
    moved = tuple(PLANTED["gradients"](one, 13) for one in planted(name, 0, 1))
    told = judged(job(moved, OTHER))
    assert (told.result, told.step) == (FAIL, 12)
    assert told.component == {"values of the samples": "samples", "generators of torch": "generators"}[name]


def test_generators_that_most_scripts_never_seed_are_compared_beside_a_twin_alone() -> None:
    """No note in every script of torch; where something follows, and twins have it alike, they explain it."""
    other = of_look(generators=lambda value: {**value, "Python": value["Python"] + 7})
    traces = tuple(other(one, 10) for one in run(first=10))
    told = judged(job(traces), None)
    assert (told.result, "differ" in told.why) == (PASS, False)
    told = judged(job(tuple(PLANTED["gradients"](one, 12) for one in traces), OTHER))
    assert (told.result, told.component, told.step) == (FAIL, "generators", 10)


def test_what_two_undisturbed_runs_do_not_repeat_is_no_failure() -> None:
    """And neither is what follows from it, though it may be near by chance; the rest of the comparison stays."""
    again = job(planted("gradients", 0, 1), OTHER)
    assert own_variation(BASELINE, again) == {"gradients": 12}
    assert variation_words({"gradients": 12}).endswith("which is not compared: gradients from step 12 on")
    assert variation_words({}) == ""
    told = judged(job(planted("weights", 0, 1), (Weight(1.4, 0.5),)), again)
    assert told.result == SKIPPED
    told = judged(job(planted("learning rate", 0, 1), OTHER), again)
    assert (told.result, told.component) == (FAIL, "learning rate")
    harmless = job(planted("generators of torch", 0, 1))
    assert judged(job(planted("weights", 0, 1), OTHER), harmless).result == FAIL, "they follow from no generator"


def test_weights_that_are_no_numbers_are_not_compared() -> None:
    """No seed helps a training that diverges."""
    bad = (Weight(float("nan"), 0.5),)
    told = judge_end("kill", learn(job(run(), bad), 2), job(run(first=10), bad), None)
    assert told is not None
    assert (told.result, told.why) == (SKIPPED, "the undisturbed run ends with weights that are no numbers")


def test_other_weights_at_the_end_alone_fail() -> None:
    """Where no step differs beyond rounding, or none was seen."""
    told = judged(job(run(first=10), OTHER))
    assert (told.result, told.component, told.step) == (FAIL, "weights", None)
    assert told.cure == cures.ALL_OF_THE_STATE


@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate", "deepspeed", "megatron"])
def test_the_cure_is_that_of_the_way_in(framework: str) -> None:
    """The adapter's one line where it is missing; where it is there, what it cannot do by itself."""
    told = judged(job(planted("samples", 0, 1), OTHER, frameworks=(framework,)))
    assert f"resilience_sdk.adapters.{framework}." in (told.cure or "")
    with_adapter = judged(job(planted("samples", 0, 1), OTHER, frameworks=(framework,), adapters=(framework,)))
    assert "samplers draw from torch's generators" in (with_adapter.cure or "")


@pytest.mark.parametrize(
    ("framework", "name", "cure"),
    [
        ("accelerate", "learning rate", "accelerator.prepare()"),
        ("accelerate", "gradients", "register_for_checkpointing()"),
        ("lightning", "learning rate", "configure_optimizers()"),
        ("lightning", "loss", "on_save_checkpoint()"),
        ("transformers", "learning rate", "optimizers=(optimizer, scheduler)"),
        ("deepspeed", "gradients", "attach(engine, state={...})"),
        ("megatron", "gradients", "state="),
        (None, "gradients", "into state="),
    ],
)
def test_behind_an_adapter_the_cure_names_what_takes_it(framework: str | None, name: str, cure: str) -> None:
    """What it could not see is given to it by that framework's own means; a loop of one's own has its `state`."""
    ways = {"frameworks": (framework,), "adapters": (framework,)} if framework else {}
    assert cure in (judged(job(planted(name, 0, 1), OTHER, **ways)).cure or "")


def test_steps_that_do_not_belong_to_each_other_are_not_compared() -> None:
    """A loop that began its epoch anew: what differs first would be whatever the misplaced steps show."""
    before = learn(job((attempt(0, 0, 20, (7, 14)),)), 1)
    told = judge_end("kill", before, job((attempt(0, 0, 10, (7,)), attempt(1, 7, 17))), job((attempt(0, 0, 20),)))
    assert told is not None
    assert (told.result, told.component, told.step) == (FAIL, "samples", None)
    assert told.why.startswith("gone on with the state after 7 steps, and 4 more were run than were left")


def test_a_state_that_is_in_the_save_is_only_to_be_loaded() -> None:
    """And one that is loaded is not to be saved: no cure is done already."""
    rate = PLANTED["learning rate"]

    def cure(saved: tuple[str, ...], loaded: tuple[str, ...]) -> str:
        first = attempt(0, 0, 10, (7,))
        first = attrs.evolve(first, saved=tuple(attrs.evolve(one, kinds=saved) for one in first.saved))
        last = rate(attrs.evolve(attempt(1, 7, 13), loaded=loaded), 4)
        told = judge_end("kill", learn(job((attempt(0, 0, 20),)), 1), job((first, last)), job((attempt(0, 0, 20),)))
        assert told is not None
        assert told.component == "learning rate", told
        return told.cure or ""

    assert cure((), ()).startswith("save and load the scheduler's state_dict()")
    assert cure(("scheduler",), ()) == "load the scheduler's state, which is in the checkpoint"
    assert cure(("scheduler",), ("scheduler",)).startswith("the scheduler's state is loaded: set no learning rate")


def test_a_loop_without_witnesses_is_shown_the_way_to_its_place() -> None:
    """One of its own that loses it: by the loader of torchdata, or by hand."""
    traces = tuple(attrs.evolve(PLANTED["gradients"](one, 12), witnessed=()) for one in run())
    looks = tuple(attrs.evolve(traces[0].looks[12], batch=1) for _ in traces)
    traces = tuple(
        attrs.evolve(one, looks=(*one.looks[:12], look, *one.looks[13:]))
        for one, look in zip(traces, looks, strict=True)
    )
    bare = job(run(has_ring=False))
    told = judge_end("kill", learn(bare, 2), job(traces, OTHER), bare)
    assert told is not None
    assert (told.component, told.step) == ("samples", 12)
    assert "StatefulDataLoader" in (told.cure or "")
