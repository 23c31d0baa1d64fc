"""The comparison of two runs, step by step: the first thing that differs is named, and what is the same never is."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_runs import PLANTED, STEPS, Change, counted_behind, look, of_look, of_ring, run, witnessed

from resilience_sdk.recorder.witness_ring import CONTENT, FIXED, UNPLACED
from resilience_sdk.rehearse.components import Difference, compare, varying

COMPONENTS = {"generators of torch": "generators", "values of the samples": "samples", "gradients": "loss"}
steps_and_ranks = st.tuples(st.integers(0, STEPS - 1), st.integers(0, 1))


@given(st.integers(0, STEPS - 1), st.integers(1, 3), st.booleans(), st.sampled_from(["heartbeats", "optimizer"]))
def test_equal_runs_never_differ(first: int, ranks: int, has_ring: bool, progress: str) -> None:
    """Wherever the other one began, and whatever is seen of both."""
    one, other = run(ranks, has_ring=has_ring), run(ranks, first, has_ring=has_ring)
    if progress == "optimizer":
        one, other = (tuple(map(counted_behind, traces)) for traces in (one, other))
    found = compare(one, other, {})
    assert (found.first, found.steps) == (None, STEPS - first)
    assert varying(one, other) == {}


@given(
    st.sampled_from(sorted(PLANTED)),
    st.integers(0, STEPS - 1),
    st.integers(0, STEPS - 1),
    st.sets(st.integers(0, 2), min_size=1),
)
def test_what_was_planted_is_named(name: str, first: int, step: int, ranks: set[int]) -> None:
    """By component, step and ranks; nothing is named of what was done before the other run began."""
    other = tuple(PLANTED[name](one, step) if one.rank in ranks else one for one in run(3, first))
    found = compare(run(3), other, {}).first
    assert found is not None
    expected = COMPONENTS.get(name, name), name, max(first, step), tuple(sorted(ranks))
    assert (found.component, found.name, found.step, found.ranks) == expected
    assert found.has_proof == (name not in ("generators of torch", "values of the samples"))


@given(st.sampled_from(sorted(PLANTED)), st.sampled_from(sorted(PLANTED)), st.integers(0, STEPS - 2), st.integers(0, 1))
def test_what_comes_first_is_named(name: str, later: str, step: int, rank: int) -> None:
    """All that follows may follow from it, on any rank; in one step it is what the others may follow from."""
    traces = [PLANTED[name](one, step) if one.rank == rank else one for one in run()]
    behind = tuple(PLANTED[later](one, step + 1) if one.rank != rank else one for one in traces)
    found = compare(run(), behind, {}).first
    assert found is not None
    assert (found.name, found.step, found.ranks) == (name, step, (rank,))
    assert found.has_proof or later in ("generators of torch", "values of the samples")


def test_in_one_step_causes_come_before_what_follows() -> None:
    """Other samples have another loss; weights that were not restored draw nothing."""
    [one] = run(1)
    other = one
    named = []
    for name in (
        "gradients",
        "loss",
        "values of the samples",
        "generators of torch",
        "weights",
        "learning rate",
        "samples",
    ):
        other = PLANTED[name](other, 5)
        first = compare((one,), (other,), {}).first
        assert first is not None
        named.append(first.name)
    # The loss is looked at before the gradients.
    assert named == [
        "gradients",
        "loss",
        "values of the samples",
        "generators of torch",
        "weights",
        "learning rate",
        "samples",
    ]


@given(st.sampled_from(sorted(PLANTED)), steps_and_ranks)
def test_what_twins_do_not_repeat_is_not_compared(name: str, place: tuple[int, int]) -> None:
    """From the step on at which they differ; before it, and all else, is."""
    step, rank = place
    again = tuple(PLANTED[name](one, step) if one.rank == rank else one for one in run())
    known = varying(run(), again)
    assert known == {name: step}
    assert compare(run(), again, known).first is None
    earlier = tuple(PLANTED[name](one, step - 1) for one in run())
    assert (compare(run(), earlier, known).first is None) == (step == 0)
    for other in sorted(set(PLANTED) - {name}):
        found = compare(run(), tuple(PLANTED[other](one, step) for one in again), known).first
        assert found is not None
        assert (found.name, found.step) == (other, step)


def test_a_loop_that_counts_anew_is_compared_from_its_end() -> None:
    """Steps of an optimizer count from 0 in each attempt; a run that begins anew has all of them."""
    one = tuple(counted_behind(trace) for trace in run(has_ring=False))
    looks = [
        tuple(attrs.evolve(look(step, rank), at=step - 13 or None) for step in range(12, STEPS)) for rank in (0, 1)
    ]
    steps = tuple((step, 0.0) for step in range(STEPS - 12))
    other = tuple(attrs.evolve(trace, looks=looks[trace.rank], steps=steps) for trace in one)
    assert compare(one, other, {}).first is None
    wrong = attrs.evolve(other[1], looks=(attrs.evolve(other[1].looks[0], gradients=(9.0, 9.0)), *other[1].looks[1:]))
    found = compare(one, (other[0], wrong), {}).first
    assert found is not None
    assert (found.name, found.step, found.ranks) == ("gradients", 12, (1,))


def test_steps_of_several_optimizers_and_of_none_are_compared() -> None:
    """A step of a GAN has two; one in the middle of an accumulation has none, and its witness is compared alone."""
    [one] = run(1)
    double = tuple(attrs.evolve(seen, weights=(seen.weights[0] * 2, 0.0)) for seen in one.looks for _ in (0, 1))
    one = attrs.evolve(one, looks=double[2:])  # the first step has no look
    assert compare((one,), (one,), {}).first is None
    second = attrs.evolve(one, looks=(one.looks[0], attrs.evolve(one.looks[1], weights=(99.0, 0.0)), *one.looks[2:]))
    found = compare((one,), (second,), {}).first
    assert found is not None
    assert (found.name, found.step) == ("weights", 1)
    found = compare((one,), (PLANTED["samples"](one, 0),), {}).first
    assert found is not None
    assert (found.name, found.step) == ("samples", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_ring(epoch=lambda value: value + 1), "batch 5 of epoch 1 instead of batch 5 of epoch 0"),
        (of_ring(order=lambda value: value + 1), "other samples in batch 5 of epoch 0"),
        (
            of_look(rates=lambda value: 0, rate=lambda value: 0.5),
            "learning rate 0.5 instead of 0.0166667",
        ),
        (of_look(rates=lambda value: 0), "another learning rate of a group behind the first"),
        (of_ring(loss=lambda value: 3.0), "loss 3 instead of 0.333333"),
    ],
)
def test_it_is_said_in_words(change: Change, words: str) -> None:
    """What is there now, and what should be."""
    [one] = run(1)
    found = compare((one,), (change(one, 5),), {}).first
    assert isinstance(found, Difference)
    assert found.words == words


def test_rounding_is_no_difference() -> None:
    """More than two ranks sum in another order; a number that is none is one, and stays one."""
    near = of_look(weights=lambda values: tuple(value * (1 + 1e-7) for value in values))
    assert compare(run(), tuple(near(one, 0) for one in run()), {}).first is None
    bad = tuple(of_look(weights=lambda values: (float("nan"), 1.0))(one, 3) for one in run())
    assert compare(bad, bad, {}).first is None
    found = compare(run(), bad, {}).first
    assert found is not None
    assert (found.name, found.step) == ("weights", 3)


def test_a_batch_whose_samples_nobody_knows_is_compared_by_its_values() -> None:
    """It explains what follows, and proves nothing: a loader may read ahead."""
    one = run(has_ring=False)
    other = tuple(of_look(batch=lambda value: value + 1)(trace, 4) for trace in one)
    found = compare(one, other, {}).first
    assert found is not None
    assert (found.component, found.name, found.has_proof) == ("samples", "batches", False)
    moved = tuple(PLANTED["gradients"](trace, 4) for trace in other)
    found = compare(one, moved, {}).first
    assert found is not None
    assert (found.component, found.step, found.has_proof) == ("samples", 4, True)


def test_the_same_content_in_each_pass_decides_like_an_order() -> None:
    """As that of a list."""
    [one] = run(1)
    fixed = attrs.evolve(one, witnessed=tuple(witnessed(step, 0, CONTENT | FIXED) for step in range(STEPS)))
    found = compare((fixed,), (of_ring(content=lambda value: value + 1)(fixed, 2),), {}).first
    assert found is not None
    assert (found.name, found.has_proof) == ("samples", True)


def test_what_nobody_has_seen_is_not_compared() -> None:
    """A rank that left nothing, a run without a step."""
    assert compare(run(), (), {}) == compare((), run(), {})
    found = compare(run(), tuple(attrs.evolve(one, looks=(), witnessed=()) for one in run()), {})
    assert (found.steps, found.names, found.first) == (0, (), None)


def test_a_step_that_has_no_gradients_yet_is_not_compared_by_them() -> None:
    """Where a closure computes them, as in Lightning, the first step of a process has none, and later ones old ones."""
    other = tuple(
        attrs.evolve(one, looks=(attrs.evolve(one.looks[0], gradients=()), *one.looks[1:])) for one in run(first=10)
    )
    found = compare(run(), other, {})
    assert found.first is None
    assert "gradients" in found.names


def test_an_order_that_counts_from_an_attempts_begin_is_not_compared() -> None:
    """As of a loop whose epochs nobody knows; what its batches hold is."""
    seen = witnessed(0).seen | UNPLACED
    runs = [
        tuple(attrs.evolve(one, witnessed=tuple(change(step) for step in one.witnessed)) for one in run())
        for change in (
            lambda step: attrs.evolve(step, seen=seen),
            lambda step: attrs.evolve(step, seen=seen, order=step.order + 7),
            lambda step: attrs.evolve(step, seen=seen, order=step.order + 7, content=step.content + 7),
        )
    ]
    assert compare(runs[0], runs[1], {}).first is None
    found = compare(runs[0], runs[2], {}).first
    assert found is not None
    assert found.name == "values of the samples"
