"""The scores are NVIDIA's, number by number, and survive what breaks theirs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.reports import OwnHistory, reference, relative_gpu_scores, relative_scores

seconds = st.floats(1e-4, 1e3)
fleets = st.dictionaries(st.integers(0, 50), seconds, min_size=1, max_size=12)


def kernels(**medians: float) -> tuple[KernelTime, ...]:
    """Kernels that each ran a hundred times."""
    return tuple(KernelTime(name, 100, value, 100 * value) for name, value in medians.items())


def test_a_rank_that_takes_n_times_as_long_has_a_score_of_one_over_n():
    """Published case: times x (rank + 1)."""
    assert relative_scores({rank: 0.01 * (rank + 1) for rank in range(4)}) == pytest.approx(
        {0: 1.0, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4}
    )


def test_a_gpu_that_takes_n_times_as_long_in_all_kernels_has_a_score_of_one_over_n():
    """Published case: the same with kernels, whose order differs between ranks."""
    of_ranks = {rank: kernels(k0=1.0 * (rank + 1), k1=3.0 * (rank + 1))[:: 1 - 2 * (rank % 2)] for rank in range(4)}
    assert relative_gpu_scores(of_ranks) == pytest.approx({0: 1.0, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4})


def test_kernels_weigh_as_much_as_the_time_spent_in_them():
    """sum(w * reference / median) / sum(w) with w = number x average = total time."""
    fast = (KernelTime("long", 10, 1.0, 10.0), KernelTime("short", 10, 0.1, 1.0))
    slow = (KernelTime("long", 10, 2.0, 20.0), KernelTime("short", 10, 0.1, 1.0))
    assert relative_gpu_scores({0: fast, 1: slow})[1] == pytest.approx((20 * 0.5 + 1 * 1.0) / 21)


def test_a_kernel_of_one_rank_alone_does_not_count():
    """Published case: a unique kernel per rank and a common one; the score is that of the common one."""
    of_ranks = {rank: kernels(common=1.0 * (rank + 1), **{f"own{rank}": 7.0}) for rank in range(4)}
    assert relative_gpu_scores(of_ranks) == pytest.approx({0: 1.0, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4})


def test_a_rank_without_a_common_kernel_has_no_score_and_takes_none_from_the_others():
    """In the reference one such rank leaves nobody a score."""
    of_ranks = {0: kernels(a=1.0), 1: kernels(a=2.0), 2: kernels(b=1.0), 3: ()}
    assert relative_gpu_scores(of_ranks) == pytest.approx({0: 1.0, 1: 0.5})


def test_the_individual_score_of_kernels_in_the_published_case():
    """x 1, 1.25, 2, 3, 4 (without k1), 5 (without k0) give 1, .8, .5, .333, .25, .2; then none, new, faster ones."""
    history = OwnHistory()
    of_reports = [kernels(k0=1.0 * by, k1=2.0 * by) for by in (1.0, 1.25, 2.0, 3.0)]
    of_reports += [kernels(k0=4.0), kernels(k1=10.0)]
    scores = [history.gpu_scores({0: rows}).get(0) for rows in of_reports]
    assert scores == pytest.approx([1.0, 0.8, 0.5, 1 / 3, 0.25, 0.2])
    assert history.gpu_scores({0: ()}) == {}
    assert history.gpu_scores({0: kernels(new=9.0)}) == {0: 1.0}
    assert history.gpu_scores({0: kernels(k0=0.8)}) == {0: 1.0}
    assert history.gpu_scores({0: kernels(k0=1.6)})[0] == pytest.approx(0.5)


def test_the_individual_score_of_sections_in_the_published_case():
    """The own best over the own median now."""
    history = OwnHistory()
    scores = [history.scores("fwd", {3: by})[3] for by in (1.0, 1.25, 2.0, 3.0, 4.0, 5.0, 0.5, 1.0)]
    assert scores == pytest.approx([1.0, 0.8, 0.5, 1 / 3, 0.25, 0.2, 1.0, 0.5])


def test_a_single_rank_is_as_fast_as_the_fastest():
    """Published case: with one rank the relative score is always 1."""
    assert relative_scores({7: 0.123}) == {7: 1.0}


def test_reports_without_samples_are_no_reports():
    """Published case: two reports in a row with nothing in them."""
    history = OwnHistory()
    for _ in range(2):
        assert relative_scores({}) == relative_gpu_scores({}) == {}
        assert history.scores("fwd", {}) == history.gpu_scores({}) == {}
    assert relative_scores({0: math.nan, 1: 0.0, 2: -1.0, 3: math.inf}) == {}


def test_an_abnormally_fast_rank_is_no_reference():
    """One rank that skips its work would else make stragglers of all others."""
    assert relative_scores({0: 2.0, 1: 10.0, 2: 10.0, 3: 10.0}) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
    scores = relative_scores({0: 2.0, 1: 10.0, 2: 10.2, 3: 9.9, 4: 20.0})
    assert scores[0] == 1.0
    assert scores[1] == pytest.approx(0.99)
    assert scores[4] == pytest.approx(0.495)


def test_three_good_ranks_of_eight_are_no_oddity():
    """Most ranks may be slow at once; only a lone fast one is left out."""
    scores = relative_scores({rank: 1.0 if rank < 3 else 2.0 for rank in range(8)})
    assert [scores[rank] for rank in range(8)] == [1.0] * 3 + [0.5] * 5


def test_one_lucky_report_does_not_spoil_those_after_it():
    """2 ms once among reports of 10 ms: in the reference the score is 0.2 for ever."""
    history = OwnHistory()
    scores = [history.scores("fwd", {0: value})[0] for value in (0.010, 0.0101, 0.002, 0.010, 0.0099, 0.020)]
    assert scores[3:5] == [1.0, 1.0]
    assert scores[5] == pytest.approx(0.495)


def test_the_own_best_is_forgotten_in_time():
    """What was reached under other conditions, long ago, is no measure."""
    history = OwnHistory(reports=3)
    assert [history.scores("fwd", {0: value})[0] for value in (1.0, 2.0, 2.0, 2.0)] == [1.0, 0.5, 0.5, 1.0]


def test_a_rank_that_moved_has_no_past():
    """Its new node is not measured against the old one."""
    history = OwnHistory()
    history.scores("fwd", {0: 1.0, 1: 1.0})
    history.gpu_scores({0: kernels(a=1.0)})
    history.forget(0)
    assert history.scores("fwd", {0: 2.0, 1: 2.0}) == {0: 1.0, 1: 0.5}
    assert history.gpu_scores({0: kernels(a=2.0)}) == {0: 1.0}


@given(fleets, st.floats(0.01, 100.0))
def test_the_unit_does_not_matter(medians: dict[int, float], scale: float):
    """Milliseconds give the scores that seconds give."""
    scaled = relative_scores({rank: scale * value for rank, value in medians.items()})
    assert scaled == pytest.approx(relative_scores(medians), rel=1e-6)


@given(fleets)
def test_scores_are_between_zero_and_one_and_somebody_has_one(medians: dict[int, float]):
    """Whatever the durations are."""
    scores = relative_scores(medians)
    assert scores.keys() == medians.keys()
    assert all(0.0 < score <= 1.0 for score in scores.values())
    assert max(scores.values()) == 1.0


@given(fleets, st.randoms())
def test_the_order_of_the_ranks_does_not_matter(medians: dict[int, float], random):
    """Permuting ranks permutes scores."""
    order = list(medians)
    random.shuffle(order)
    assert relative_scores({rank: medians[rank] for rank in order}) == relative_scores(medians)


@given(fleets)
def test_who_is_slower_never_has_the_better_score(medians: dict[int, float]):
    """Within one report."""
    scores = relative_scores(medians)
    ordered = sorted(medians, key=medians.__getitem__)
    assert all(scores[a] >= scores[b] for a, b in pairwise(ordered))


@given(st.lists(seconds, min_size=1, max_size=30))
def test_the_reference_is_one_of_the_two_fastest(values: list[float]):
    """One value in 64 may be left out, and one at least."""
    assert reference(values) in sorted(values)[:2]
