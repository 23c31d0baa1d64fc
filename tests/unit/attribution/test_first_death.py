"""The culprit is the first rank that died of something of its own."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.first_death import Death, find_first_death

PEER = {
    "type": "RuntimeError",
    "message": "gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4",
}
STORE = {"type": "torch.distributed.DistStoreError", "message": "wait timeout after 300000ms, keys: /x"}
BUG = {"type": "KeyError", "message": "'lr'", "user_frame": "train.py:9 main"}
MS = 1_000_000


def test_the_killed_rank_is_the_culprit_and_its_peers_are_victims():
    """SIGKILL of one rank; the others lose their connection and are then ended by the launcher."""
    found = find_first_death(
        [Death(0, 1, PEER, 5 * MS), Death(1, -9, None, 1 * MS), Death(2, -15, None, 30 * MS)],
        ending_ns=20 * MS,
    )
    assert (found.culprits, found.victims) == ((1,), (0, 2))
    assert found.classification.cause == "rank_killed_sigkill"
    assert found.classification.evidence[0].text == "rank 1 was the first to die of its own: it died by SIGKILL"


def test_a_later_exception_of_the_user_beats_an_earlier_symptom():
    """The rank with the bug may take longest to die: its peers' connection errors come first."""
    found = find_first_death([Death(0, 1, PEER, 1 * MS), Death(1, 1, BUG, 900 * MS)])
    assert (found.culprits, found.victims) == ((1,), (0,))
    assert found.classification.cause == "user_code_error"


def test_an_exception_counts_even_after_the_launcher_began_to_end_the_ranks():
    """It was raised before; only the process took its time. A bare SIGTERM death counts for nothing."""
    deaths = [Death(0, 1, PEER, 1 * MS), Death(1, -15, BUG, 60 * MS), Death(2, -9, None, 50 * MS)]
    assert find_first_death(deaths, ending_ns=20 * MS).culprits == (1,)


def test_all_ranks_with_the_same_exception_share_it():
    """An import error on every rank has no victim."""
    found = find_first_death([Death(rank, 1, BUG, rank * MS) for rank in range(4)])
    assert (found.culprits, found.victims) == ((0, 1, 2, 3), ())


def test_a_different_exception_later_is_no_culprit():
    """What breaks in the wake of the first fault is not the fault."""
    other = {**BUG, "message": "'momentum'"}
    found = find_first_death([Death(0, 1, BUG, 1 * MS), Death(1, 1, other, 2 * MS)])
    assert (found.culprits, found.victims) == ((0,), (1,))


def test_of_deaths_in_one_poll_the_surest_speaks():
    """A watchdog's abort beside a segmentation fault is its consequence."""
    found = find_first_death([Death(0, -6, None, MS), Death(1, -11, None, MS)])
    assert (found.culprits, found.victims) == ((1,), (0,))


def test_only_symptoms_name_nobody():
    """The first fault is on another node: no culprit, low confidence, and that is said."""
    found = find_first_death([Death(0, 1, PEER, MS), Death(1, 1, STORE, 2 * MS)])
    assert (found.culprits, found.victims) == ((), (0, 1))
    assert found.classification.confidence <= 0.3
    assert "not among them" in found.classification.evidence[0].text


def test_a_rank_that_finished_early_left_the_others_alone():
    """Exit code 0 before the peers' connection errors: uneven inputs."""
    found = find_first_death([Death(0, 0, None, MS), Death(1, 1, PEER, 2 * MS)])
    assert (found.culprits, found.victims) == ((0,), (1,))
    assert found.classification.cause == "user_uneven_inputs"


@pytest.mark.parametrize(("ended_ms", "ending_ms", "culprits"), [(150, 300, (0,)), (150, None, (0,)), (350, 300, ())])
def test_a_rank_that_finished_may_take_a_moment_to_end(ended_ms, ending_ms, culprits):
    """Its connections close before its process does; an exit after the launcher's signal may be a handler's."""
    deaths = [Death(0, 0, None, ended_ms * MS), Death(1, 1, PEER, 100 * MS)]
    found = find_first_death(deaths, ending_ns=None if ending_ms is None else ending_ms * MS)
    assert found.culprits == culprits


def test_leaving_when_asked_is_nobodys_fault():
    """Ranks that exit 75 are no culprits, whatever their peers' connections say afterwards."""
    found = find_first_death([Death(0, 75, None, MS), Death(1, 1, PEER, 2 * MS)])
    assert found.culprits == ()
    assert found.classification.action == "requeue"


@pytest.mark.parametrize(("codes", "cause"), [((0, 0), "no_fault"), ((), "unknown"), ((-15, -15), "unknown")])
def test_nothing_to_see(codes, cause):
    """A good end, no end at all, and an end that the launcher made itself have no culprit."""
    found = find_first_death([Death(r, c, None, 5) for r, c in enumerate(codes)], ending_ns=1)
    assert (found.culprits, found.classification.cause) == ((), cause)


victims = st.builds(
    Death,
    rank=st.just(0),
    exit_code=st.sampled_from([1, -15, -6]),
    exception=st.sampled_from([PEER, STORE]),
    t_ns=st.integers(0, 100 * MS),
)


@given(st.lists(victims, min_size=1, max_size=7), st.sampled_from([-9, -11, -7]), st.data())
def test_the_order_of_the_victims_never_changes_the_culprit(others, exit_code, data):
    """Whatever the polls saw first: one real death among symptoms is always the one."""
    ranks = data.draw(st.permutations(range(len(others) + 1)))
    culprit = Death(ranks[-1], exit_code, None, data.draw(st.integers(0, 100 * MS)))
    deaths = [*(attrs.evolve(d, rank=r) for d, r in zip(others, ranks, strict=False)), culprit]
    found = find_first_death(data.draw(st.permutations(deaths)), ending_ns=101 * MS)
    assert found.culprits == (culprit.rank,)
    assert set(found.victims) == set(ranks[:-1])
