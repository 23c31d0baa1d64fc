"""Steps that are done twice are compared part by part, and what differs first is named."""

from __future__ import annotations

import json
import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.resume_limits import ResumeLimit
from resilience_sdk.core.resume_proof import EXACT, NOT_COMPARED, NOT_EXACT, NOT_PROVEN, ResumeCheck
from resilience_sdk.rank.repeated import CURES, Comparison, begin, differing_part
from resilience_sdk.rank.witness import rates_of
from resilience_sdk.recorder import witness_ring
from resilience_sdk.recorder.witness_ring import (
    CONTENT,
    FIXED,
    GENERATORS,
    LOSS,
    ORDER,
    RATES,
    STEPS,
    UNPLACED,
    WEIGHTS,
    WitnessedStep,
    Witnesses,
    WitnessRing,
)

BUT = " in samples and learning rates; losses and weights not compared"
ALL = ORDER | CONTENT | RATES | GENERATORS
ONE = WitnessedStep(9, 1, 4, ALL, 11, 12, 13, 14, 0, 0.1, 15)
COUNTS = st.integers(0, 2**32 - 1)
WITNESSES = st.builds(
    WitnessedStep, st.integers(0, 2000), COUNTS, COUNTS, st.integers(0, 255), COUNTS, COUNTS, COUNTS, COUNTS, COUNTS,
    st.floats(allow_nan=False), st.integers(0, 2**64 - 1), st.floats(allow_nan=False),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "result", "words"),
    [
        ({}, EXACT, f"1 of 1 repeated step equal{BUT}"),
        ({"order": 1}, NOT_EXACT, "step 9: other samples"),
        ({"content": 1, "seen": ALL & ~ORDER | FIXED | UNPLACED}, NOT_EXACT, "step 9: other values in the batch"),
        ({"batch": 1}, NOT_COMPARED, "step 9 has 1 batches of the loader now, 4 before"),
        ({"seen": ALL}, NOT_COMPARED, "the loop is another one than before"),
    ],
)
def test_a_loop_that_does_not_know_its_epoch_is_compared_without_it(changes, result, words):
    """How many batches a step has stands for the place; another number of them is the user's choice."""
    told = []
    before = attrs.evolve(ONE, seen=ALL | UNPLACED)
    if FIXED & changes.get("seen", 0):
        before = attrs.evolve(before, seen=changes["seen"])
    comparison = Comparison({9: before}, told.append, last=9)
    comparison.look(attrs.evolve(before, **changes))
    comparison.close()
    assert [(check.result, check.text) for check in told] == [(result, words)]


@pytest.mark.parametrize(
    ("changes", "part", "words"),
    [
        ({}, None, None),
        ({"order": 1}, "samples", "other samples, the order of epoch 1"),
        ({"batch": 5}, "samples", "batch 5 of epoch 1 instead of batch 4 of 1"),
        ({"content": 1}, None, None),
        ({"shapes": 1, "generators": 3}, None, None),  # cut at random, by numbers of its own
        ({"content": 1, "seen": ALL & ~ORDER | FIXED}, "samples", "other values in batch 4 of epoch 1"),
        ({"rates": 1, "rate": 0.05}, "learning rate", "learning rate 0.05 instead of 0.1"),
        ({"rates": 1}, "learning rate", "another learning rate of a group behind the first"),
        ({"generators": 1}, "generators", "random number generators in another state"),
        ({"order": 1, "rates": 1, "generators": 1}, "samples", "other samples, the order of epoch 1"),
        ({"order": 1, "rates": 1, "generators": 1, "seen": CONTENT}, None, None),
    ],
)
def test_the_part_that_differs_first_is_named(changes, part, words):
    """Samples before rates before generators; content alone is no difference where it may be random."""
    before = attrs.evolve(ONE, seen=changes.get("seen", ALL))
    found = differing_part(before, attrs.evolve(ONE, **changes))
    assert found == (None if part is None else (part, words))


def compare(before, now, **options):
    """Return what is told of these steps, which begin at the first of `now`; those before are of length 3."""
    told = []
    found = Witnesses(0, 1, 0, 7, "j", {one.step: one for one in before}, 3, 2)
    comparison = begin(found, now[0].step, 1, 7, (), told.append, **options)
    for one in now:
        if comparison is not None and not comparison.look(one):
            comparison = None
    if comparison is not None:
        comparison.close()
    return told


def steps(first, last, **changes):
    return [attrs.evolve(ONE, step=step, **changes) for step in range(first, last)]


def test_equal_steps_prove_the_resume():
    """Those that are done again, of all that the attempt before has done."""
    [check] = compare(steps(0, 15), steps(10, 30))
    assert (check.result, check.line) == (EXACT, f"resume exact as far as compared: 5 of 5 repeated steps equal{BUT}")
    [check] = compare(steps(0, 15), steps(10, 12))  # it was ended again before it came so far
    assert check.text == f"2 of 2 repeated steps equal{BUT}"
    assert compare(steps(0, 10), steps(10, 12)) == []  # nothing is repeated behind a stop


def test_what_is_left_of_more_steps_than_there_is_room_for_is_compared():
    """The oldest are not there any more; one that was left out is passed over."""
    [check] = compare([*steps(20, 23), *steps(24, 26)], steps(10, 40))
    assert check.text == f"5 of 5 repeated steps equal{BUT}"


def test_the_first_step_that_differs_is_named_and_nothing_behind_it():
    """With the cure."""
    [check] = compare(steps(0, 15), [*steps(10, 12), *steps(12, 15, order=5)])
    assert (check.result, check.step, check.component) == (NOT_EXACT, 12, "samples")
    assert check.line.startswith("resume_not_exact: step 12: other samples, the order of epoch 1; the data have to")


def test_a_rate_that_the_program_changes_at_the_resume_is_its_own():
    """One that differs later only is none that a resume has begun with."""
    assert compare(steps(0, 15), steps(10, 15, rates=1, rate=0.5))[0].result == EXACT
    [check] = compare(steps(0, 15), [*steps(10, 11), *steps(11, 15, rates=1, rate=0.5)])
    assert check.text == "step 11: learning rate 0.5 instead of 0.1"


def test_a_training_that_was_made_longer_has_other_rates_on_purpose():
    """Its samples and generators are compared all the same; where a length is not known, so are rates."""
    now = [*steps(10, 11), *steps(11, 15, rates=1, rate=0.5)]
    [check] = compare(steps(0, 15), now, length=4)
    assert (check.result, check.text) == (
        EXACT,
        "5 of 5 repeated steps equal; their learning rates not compared: the training has another length than before",
    )
    [check] = compare(steps(0, 15), [*steps(10, 12), *steps(12, 15, order=5)], length=4)
    assert (check.result, check.step, check.component) == (NOT_EXACT, 12, "samples")
    for known in (0, 3):
        assert compare(steps(0, 15), now, length=known)[0].component == "learning rate"


def test_steps_of_another_training_of_the_program_are_not_compared():
    """One that is not known, as of an older version, is taken for the same."""
    now = steps(10, 15, order=5)
    [check] = compare(steps(0, 15), now, training=1)
    assert (check.result, check.text.partition(":")[0]) == (
        NOT_COMPARED,
        "these steps were those of another training before",
    )
    assert [compare(steps(0, 15), now, training=known)[0].component for known in (0, 2)] == ["samples"] * 2


def test_what_is_random_on_purpose_is_a_note_or_not_compared():
    """Map-style data are the same samples; of a stream nobody can tell."""
    [check] = compare(steps(0, 15), steps(10, 15, content=99))
    assert check.text == (
        "5 of 5 repeated steps equal; 5 with other values of the same samples, as of an augmentation with numbers of "
        "its own"
    )


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (CONTENT, CONTENT, "batches of a stream are not repeatable"),
        (ALL, CONTENT, "batches of a stream are not repeatable"),
        (CONTENT, ALL, "the attempt before has left no indices of them"),
    ],
)
def test_other_values_of_samples_that_nobody_knows_are_not_compared(before, now, why):
    """In one of the two attempts: of an augmentation it would be a guess. The reason is that of the loader."""
    again = [*steps(10, 13, seen=now), *steps(13, 15, seen=now, content=99)]
    [check] = compare(steps(0, 15, seen=before), again, why_unknown=lambda: "batches of a stream are not repeatable")
    which = "2 of 5 repeated steps have other values of samples that are not known"
    assert (check.result, check.text) == (NOT_COMPARED, f"{which}: {why}")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (3, "a step has other batches than before, or its samples are known no more (ValueError: no)"),
        (9, "a step has other batches, or the loader other data"),
    ],
)
def test_facts_that_are_not_known_any_more_are_no_other_data(facts, why):
    """3 is what stands for them here. The other way around it is the attempt before that has left none."""
    told = []
    for before, now in ((7, facts), (facts, 7)):
        found = Witnesses(0, 1, 0, before, "j", {9: ONE})
        assert begin(found, 5, 1, now, (), told.append, why_unknown=lambda: "ValueError: no", no_facts=3) is None
    assert {check.result for check in told} == {NOT_COMPARED}
    assert told[0].text.startswith(why)
    assert told[1].text.startswith("the attempt before has left no indices" if facts == 3 else why)


@pytest.mark.parametrize(
    ("size", "facts", "skipped", "why"),
    [(2, 7, (), "1 ranks were"), (1, 8, (), "a step has other"), (1, 7, (3,), "the run was rolled back")],
)
def test_what_has_changed_is_not_compared(size, facts, skipped, why):
    """Other ranks, another size of a batch, a rollback: by choice, and said why."""
    told = []
    assert begin(Witnesses(0, 1, 0, 7, "j", {9: ONE}), 5, size, facts, skipped, told.append) is None
    assert (told[0].result, told[0].text.startswith(why)) == (NOT_COMPARED, True)


def test_rates_of_all_groups_count():
    """Those on a device are not read: that would wait for it."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": layer.weight, "lr": 1.0}, {"params": layer.bias}], lr=0.5)
    before = rates_of([optimizer])
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    assert (before[1], before[0] != rates_of([optimizer])[0]) == (1.0, True)
    optimizer.param_groups[1]["lr"] = torch.empty((), device="meta")
    assert rates_of([optimizer]) is None
    assert rates_of([]) is None


@given(st.lists(WITNESSES, max_size=8))
def test_a_ring_gives_back_the_newest_of_each_place(tmp_path_factory, found):
    """Also when it was kept in the run directory."""
    place = tmp_path_factory.mktemp("ring")
    stem = place / "a3-r5-77"
    ring = WitnessRing(place / f"a3-r5-77{witness_ring.SUFFIX}", rank=5, world_size=8, attempt=3, facts=9)
    ring.is_of(4, 6)
    newest = {}
    for one in found:
        ring.put(*attrs.astuple(one))
        newest[one.step % STEPS] = one
    expected = {one.step: one for one in newest.values()}
    there = witness_ring.find(place, place / "run", 5, 4, "job")
    assert there == Witnesses(5, 8, 3, 9, "job", expected, 4, 6)
    (place / "run").mkdir()
    assert witness_ring.keep(stem, place / "run", "job") is bool(expected)
    if expected:
        (place / "empty").mkdir()
        for attempt, job in ((4, "job"), (0, "other"), (0, "job")):
            assert witness_ring.find(place / "empty", place / "run", 5, attempt, job) == there
        assert witness_ring.find(place / "empty", place / "run", 5, 5, "job") is None  # its node was lost since


def test_steps_of_a_version_that_left_no_weights_are_read(tmp_path):
    """In their order; they say that there were none."""
    (tmp_path / "witness").mkdir()
    step = [9, 1, 4, ALL, 11, 12, 13, 14, 0.1, 15, 0.0]
    facts = {"v": 1, "rank": 1, "world_size": 1, "attempt": 0, "facts": 7, "job": "j", "steps": [step]}
    witness_ring.place_of(tmp_path, 1).write_text(json.dumps(facts))
    assert witness_ring.find(tmp_path, tmp_path, 1, 1, "j").steps == {9: ONE}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rank": 1, "steps": [[1]]}', "\x00", '{"steps": 5}'])
def test_what_is_no_ring_is_nothing(tmp_path, text):
    """Torn, of another version, or put there by somebody."""
    (tmp_path / "witness").mkdir()
    witness_ring.place_of(tmp_path, 1).write_text(text)
    (tmp_path / f"a0-r1-5{witness_ring.SUFFIX}").write_bytes(b"rslwit03 and no more")
    assert witness_ring.find(tmp_path, tmp_path, 1, 1, "j") is None
    assert witness_ring.keep(tmp_path / "a0-r1-5", tmp_path, "j") is False
    assert json.dumps(text)


def test_a_comparison_is_closed_once():
    """However often the loop ends."""
    told = []
    comparison = Comparison({9: ONE, 10: ONE}, told.append, 10)
    comparison.look(ONE)
    comparison.close()
    comparison.close()
    assert len(told) == 1


def compare_losses(losses, is_trusted, seen=ALL, **options):
    """Return what is told where these are the losses of the steps from 10 on, each heard a step late."""
    told = []
    before = steps(10, 15, seen=seen | LOSS, loss=1.5)
    found = Witnesses(0, 1, 0, 7, "j", {one.step: one for one in before})
    comparison = begin(found, 10, 1, 7, (), told.append, lambda: is_trusted, **options)
    for number in range(10, 18):
        if not comparison.look(attrs.evolve(ONE, step=number)):
            break
        if number > 10 and number - 11 < len(losses):
            comparison.hear(number - 1, losses[number - 11])
    return told


def test_a_loss_counts_where_all_else_is_equal_and_this_run_has_repeated_it_before():
    """Kernels may give another sum each time: until losses were equal once, nobody knows."""
    [check] = compare_losses([1.5] * 5, False)
    assert check.text == "5 of 5 repeated steps equal, their losses, too"
    [check] = compare_losses([1.5, 1.5001, 1.5], False)
    assert (check.result, check.text) == (EXACT, "5 of 5 repeated steps equal, but not all losses")
    [check] = compare_losses([1.5, 1.25, 1.5], None)
    assert (check.result, check.text) == (EXACT, "5 of 5 repeated steps equal, but not all losses")
    [check] = compare_losses([1.5, 1.25, 1.5], True)
    assert (check.result, check.component, check.step) == (NOT_EXACT, "loss", 11)
    assert check.text == "step 11: loss 1.25 instead of 1.5, of the same samples and learning rate"


def test_a_loss_that_is_far_off_is_said_though_it_proves_nothing():
    """No kernel makes so much of the same values; a state that no checkpoint holds may."""
    [check] = compare_losses([1.5, 1.25, 1.5], False)
    assert (check.result, check.component, check.step) == (NOT_PROVEN, "loss", 11)
    line = "resume not proven exact: step 11: loss 1.25 instead of 1.5, of the same samples and learning rate; "
    assert check.line == line + CURES["loss"]
    [check] = compare_losses([1.5, math.nan], False)
    assert check.result == NOT_PROVEN
    [check] = compare_losses([1.5, 1.25, 1.5], False, seen=ALL & ~CONTENT)
    assert check.result == EXACT


LOST = [
    ResumeLimit("a", "tau of the module net", "it begins anew", "save it"),
    ResumeLimit("b", "requires_grad of 2 parameters of net", "it begins anew", "save it"),
]
UNSEEN = [ResumeLimit("c", "what workers draw", "others (where nothing is drawn the resume is exact)", "seed it")]


def test_steps_beside_what_is_lost_are_not_called_exact():
    """It may show later, as slow weights do. What nobody can see is proven by equal losses."""
    [check] = compare(steps(0, 15), steps(10, 30), not_repeated=lambda: LOST)
    assert check.line == (
        f"resume not proven exact: 5 of 5 repeated steps equal{BUT}; this resume does not repeat "
        "tau of the module net; requires_grad of 2 parameters of net"
    )
    assert (check.result, check.component, check.event.value) == (NOT_PROVEN, None, "resume_check")
    for losses, lost, result in (
        ([1.5] * 5, LOST, NOT_PROVEN),
        ([1.5] * 5, UNSEEN, EXACT),
        ([1.5, 1.5001, 1.5], UNSEEN, NOT_PROVEN),
    ):
        [check] = compare_losses(losses, False, not_repeated=lambda lost=lost: lost)
        assert check.result == result


def learning(*weights):
    return [attrs.evolve(ONE, step=10 + at, seen=ALL | WEIGHTS, weights=one) for at, one in enumerate(weights)]


def test_weights_prove_steps_whose_losses_nobody_reads():
    """Once the training has changed them: as long as they are those of the save they prove nothing."""
    [check] = compare(learning(1, 2, 3), learning(1, 2, 3), not_repeated=lambda: UNSEEN)
    assert (check.result, check.text) == (EXACT, "3 of 3 repeated steps equal, their weights, too")
    [check] = compare(learning(1, 1, 1), learning(1, 1, 1))
    assert (check.result, check.text) == (EXACT, f"3 of 3 repeated steps equal{BUT}")


@pytest.mark.parametrize(("is_trusted", "result"), [(False, NOT_PROVEN), (True, NOT_EXACT), (None, EXACT)])
def test_other_weights_of_equal_samples_are_said(is_trusted, result):
    """A finding where this run has repeated its losses or weights before; on three ranks they prove nothing."""
    [check] = compare(learning(1, 2, 3), learning(1, 4, 5), is_trusted=lambda: is_trusted)
    assert check.result == result
    if result != EXACT:
        text = "step 11: other weights than before, of the same samples and learning rate"
        assert (check.text, check.component, check.step, check.cure) == (text, "weights", 11, CURES["weights"])


@pytest.mark.parametrize("changes", [{"content": 99}, {"rates": 1}])
def test_other_weights_of_other_values_or_rates_are_none(changes):
    """They follow from those."""
    now = [attrs.evolve(one, **changes) for one in learning(1, 4, 5)]
    [check] = compare(learning(1, 2, 3), now)
    assert check.result == EXACT
    assert "not compared" in check.text or "with other values" in check.text


def test_one_repeated_step_waits_for_what_is_said_behind_it():
    """What a module has lost is said behind the first step of a resume."""
    told, lost = [], []
    comparison = Comparison({9: ONE}, told.append, 9, not_repeated=lambda: lost)
    assert comparison.look(ONE)
    lost += LOST
    assert told == []
    assert not comparison.look(attrs.evolve(ONE, step=10))
    assert [check.result for check in told] == [NOT_PROVEN]


def test_a_loss_is_left_with_its_step(tmp_path):
    """If that is still in the ring."""
    ring = WitnessRing(tmp_path / "a0-r0-77.witness", rank=0, world_size=1, attempt=0, facts=0)
    ring.put(*attrs.astuple(ONE))
    ring.add_loss(9, 2.5)
    ring.add_loss(9 + STEPS, 3.5)
    [one] = witness_ring.find(tmp_path, tmp_path, 0, 1, "j").steps.values()
    assert one == attrs.evolve(ONE, seen=ALL | LOSS, loss=2.5)


@pytest.mark.parametrize(
    ("what", "rank", "line"),
    [
        ("steps", 0, "resume_not_exact: step 6: other samples; a cure"),
        ("steps", 3, "resume_not_exact: rank 3: step 6: other samples; a cure"),
        ("state", 3, "resume_not_exact: step 6: other samples; a cure"),  # which names the rank itself
    ],
)
def test_what_one_rank_alone_finds_is_said_with_its_number(what, rank, line):
    """All have the same to say as a rule."""
    assert ResumeCheck(what, NOT_EXACT, "step 6: other samples", "samples", 6, rank, "a cure").line == line


@pytest.mark.parametrize(("is_partial", "result"), [(True, EXACT), (False, NOT_EXACT)])
def test_a_first_loss_of_which_a_part_was_made_before_the_save_is_not_compared(is_partial, result):
    """As of a GAN whose discriminator comes behind the step that counts; the losses behind it are."""
    told = []
    before = {one.step: one for one in steps(5, 8, seen=ALL | LOSS, loss=1.0)}
    comparison = Comparison(before, told.append, last=7, is_trusted=lambda: True)
    for number, one in before.items():
        comparison.look(one)
        comparison.hear(number, 0.25 if number == 5 else 1.0)
        comparison.is_first_loss_partial = is_partial
    comparison.close()
    assert [check.result for check in told] == [result]
