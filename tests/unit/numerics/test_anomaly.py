"""Whom bad values name."""

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.numerics.anomaly import Trouble, is_same_episode, judge

troubles = st.builds(
    Trouble,
    rank=st.integers(0, 3),
    step=st.integers(0, 20),
    name=st.sampled_from(["loss", "grad_norm"]),
    found=st.sampled_from(["nan", "inf", "spike"]),
    value=st.just(float("nan")),
)


def bad(rank, step, name="loss", found="nan"):
    return Trouble(rank, step, name, found, float("nan"))


def test_the_rank_whose_loss_was_bad_is_named_and_not_those_whose_gradients_it_spoilt():
    """The norm of reduced gradients is bad everywhere in the same step, the losses of the others in the next."""
    seen = [bad(0, 40, "grad_norm"), bad(1, 40, "grad_norm"), bad(0, 41), bad(1, 40)]
    told = judge(seen, 2)
    assert (told.culprits, told.first.cause, told.first.step) == ((1,), "nan_loss", 40)


def test_bad_on_all_ranks_at_once_names_nobody():
    """What all share (weights, learning rate) is no rank's fault; neither is a norm that is equal on all."""
    assert judge([bad(0, 7), bad(1, 7)], 2).culprits == ()
    assert judge([bad(1, 7, "grad_norm")], 2).culprits == ()
    assert judge([bad(0, 7, "grad_norm")], 1).culprits == (0,)


def test_words_and_causes():
    """The text has value, step and rank; the cause is the taxonomy's."""
    spike = Trouble(3, 9, "loss", "spike", 41.2, is_global=True, usual=2.31)
    assert spike.text == "loss spikes (41.2, usually 2.31) at step 9 on rank 3"
    assert spike.cause == "loss_spike"
    assert bad(0, 9, "grad_norm", "inf").text == "grad_norm is inf at step 9 of this attempt on rank 0"
    assert bad(0, 9, "grad_norm", "inf").cause == "nan_grad_anomaly"


@given(st.lists(troubles, min_size=1), st.randoms(), st.integers(1, 4))
def test_the_judgement_does_not_depend_on_who_writes_first(seen, draw, world_size):
    """Ranks write in any order; the report is the same, and names only ranks of the earliest step."""
    shuffled = list(seen)
    draw.shuffle(shuffled)
    told = judge(seen, world_size)
    assert judge(shuffled, world_size) == told
    assert told.first.step == min(trouble.step for trouble in seen)
    assert set(told.culprits) <= {trouble.rank for trouble in seen if trouble.step == told.first.step}


def test_an_episode_ends_after_sixteen_steps():
    """What comes later is something new."""
    assert is_same_episode(bad(0, 26), [bad(0, 10)])
    assert not is_same_episode(bad(0, 27), [bad(0, 10)])
