"""What a training logs is compared, where all of its steps are alike: values, and whether they are there at all."""

from __future__ import annotations

import attrs
import pytest
from planted_runs import run

from resilience_sdk.rank.rehearsal import RehearsedRank, Weight
from resilience_sdk.rehearse import records
from resilience_sdk.rehearse.ends import judge_end
from resilience_sdk.rehearse.judge import FAIL, PASS
from resilience_sdk.rehearse.plan import JobFacts, learn

LOGGED = tuple(
    one
    for step in range(2, 20, 2)
    for one in (("loss", step, 2.0 / step), ("eval_loss", step, 3.0 / step), ("train_runtime", step, 0.7))
)


def runs(first: int = 0, *, by_rank: dict[int, tuple] | None = None) -> tuple[RehearsedRank, ...]:
    """Return a run that logs; `by_rank`: what a rank logs in the place of that."""
    kept = tuple(one for one in LOGGED if one[1] >= first)
    return tuple(attrs.evolve(one, records=(by_rank or {}).get(one.rank, kept)) for one in run(first=first))


def without(name: str, step: int) -> tuple:
    return tuple(one for one in LOGGED if one[1] >= 10 and one[:2] != (name, step))


def changed(name: str, step: int, factor: float) -> tuple:
    return tuple((*one[:2], one[2] * factor) if one[:2] == (name, step) else one for one in LOGGED if one[1] >= 10)


@pytest.mark.parametrize(
    ("logged", "component", "step", "words"),
    [
        (without("eval_loss", 12), "epoch metric", 12, "eval_loss is not logged"),
        (changed("loss", 14, 1.01), "record", 14, "loss 0.144286 instead of 0.142857"),
        ((*without("", 0), ("loss", 16, 0.125)), "record", 16, "loss is logged 2 times instead of 1"),
        ((*without("", 0), ("best", 13, 1.0)), "record", 13, "best is logged, and was not"),
        (changed("loss", 14, float("nan")), "record", 14, "loss nan instead of 0.142857"),
    ],
)
def test_the_first_record_that_differs_is_named(logged: tuple, component: str, step: int, words: str) -> None:
    """On the rank that has it."""
    found = records.compare(runs(), runs(10, by_rank={1: logged}))
    assert found is not None
    assert (found.component, found.step, found.ranks, found.words) == (component, step, (1,), words)


@pytest.mark.parametrize(
    "logged",
    [
        without("", 0),
        without("eval_loss", 10),  # it may have been made before the save
        changed("loss", 14, 1.0001),
        changed("train_runtime", 14, 9.0),
        (),
    ],
)
def test_what_is_no_difference(logged: tuple) -> None:
    """Rounding, clocks, and what was logged in the step of the save."""
    assert records.compare(runs(), runs(10, by_rank={1: logged})) is None


def job(traces: tuple[RehearsedRank, ...]) -> JobFacts:
    """Return what a job of these traces has left, whose weights are alike."""
    return JobFacts((0,), 5.0, (tuple(attrs.evolve(one, weights=(Weight(1.0, 0.5),)) for one in traces),), (), ())


def test_the_end_is_not_equal_where_a_record_is_another_one() -> None:
    """Beside two undisturbed runs that have it alike; what these do not repeat is not compared."""
    undisturbed, other = job(runs()), job(runs(10, by_rank={0: without("eval_loss", 12), 1: without("eval_loss", 12)}))
    baseline = learn(undisturbed, 2)
    assert judge_end("kill", baseline, other, None) is None
    told = judge_end("kill", baseline, other, undisturbed)
    assert told is not None
    assert (told.result, told.component, told.step, told.ranks) == (FAIL, "epoch metric", 12, (0, 1))
    assert (told.why, "an evaluation that is due" in (told.cure or "")) == (
        "step 12: eval_loss is not logged, where two undisturbed runs are alike",
        True,
    )
    random = tuple((*one[:2], one[2] * 3) if one[0] == "eval_loss" else one for one in LOGGED)
    told = judge_end("kill", baseline, other, job(runs(by_rank={0: random, 1: random})))
    assert told is not None
    assert told.result == PASS


def test_a_pass_says_what_was_not_seen() -> None:
    """Records that were compared; and that nothing is known of samples and losses without witnesses."""
    told = judge_end("kill", learn(job(runs()), 2), job(runs(10)), None)
    assert told is not None
    assert told.why.endswith("; records of 5 steps compared")
    bare = job(tuple(attrs.evolve(one, witnessed=()) for one in run()))
    told = judge_end("kill", learn(bare, 2), bare, None)
    assert told is not None
    assert told.why.endswith("no witnesses of this loop's steps, so not the order of samples, nor losses")
