"""Who tries a reduction with whom, and who is named for what came of it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.health.nodes.pairing import MOST_ROUNDS, Trial, judge, next_pairs, usual_seconds

SOUND_S, RATE = 0.1, 50.0


def play(count, *, cut=(), slow=(), lame=(), noise=lambda: 1.0, limit=MOST_ROUNDS):
    """Hold rounds among that many nodes until nothing is open; return how it stands, and the trials."""
    trials = []
    for round_ in range(limit):
        pairs = next_pairs(range(count), trials)
        if not pairs:
            break
        partners = [node for pair in pairs for node in pair]
        assert len(partners) == len(set(partners))  # nobody is asked for twice at a time
        for pair in pairs:
            seconds = None if set(pair) & set(cut) else SOUND_S * (4 if set(pair) & set(slow) else 1) * noise()
            rates = {node: RATE / (3 if node in lame else 1) * noise() for node in pair}
            trials.append(Trial(round_, pair, seconds, "" if seconds else "no answer", rates))
    return judge(range(count), trials), trials


def noise_of(seed):
    """Return a source of noise: reductions and products of sound nodes differ by up to a third."""
    source = random.Random(seed)
    return lambda: source.uniform(0.86, 1.16)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers())
def test_sound_nodes_are_not_named(count, seed):
    """Whatever their noise; and they take one round, or three where three nodes have to be compared."""
    standing, trials = play(count, noise=noise_of(seed))
    assert not standing.bad
    assert not standing.open
    assert not standing.ways
    assert trials[-1].round < (3 if count == 3 else 1 + count % 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 40), st.sampled_from(["cut", "slow", "lame"]), st.data())
def test_one_bad_node_is_named_and_nobody_else(count, how, data):
    """Whichever it is, whether its reductions fail, are slow, or it computes slowly."""
    bad = data.draw(st.integers(0, count - 1))
    standing, trials = play(count, **{how: {bad}}, noise=noise_of(data.draw(st.integers())))
    named = {"cut": standing.failing, "slow": standing.slow, "lame": standing.computes_slowly}[how]
    assert named == standing.bad == {bad}
    assert not standing.open
    assert trials[-1].round < (2 if count % 2 == 0 else 3)  # as DLRover's: the second round names it


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 40), st.tuples(*[st.sampled_from(["cut", "slow", "lame"])] * 2), st.data())
def test_two_bad_nodes_are_named_and_nobody_else(count, how, data):
    """Beside one another or not, ill in the same way or not."""
    bad = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    ills = {kind: {node for node, its in zip(bad, how, strict=True) if its == kind} for kind in how}
    standing, _ = play(count, **ills, noise=noise_of(data.draw(st.integers())))
    assert standing.bad == set(bad)
    assert not standing.open


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.data())
def test_a_node_that_once_went_well_is_never_named_for_its_reductions(count, data):
    """However many are bad; and the rounds come to an end."""
    cut = data.draw(st.sets(st.integers(0, count - 1)))
    standing, trials = play(count, cut=cut)
    assert standing.failing <= cut
    assert trials[-1].round < MOST_ROUNDS
    for trial in trials:
        assert trial.seconds is None or not set(trial.pair) & standing.failing


def test_of_two_nodes_nobody_can_be_named():
    """The pair fails, and either may be the reason."""
    standing, trials = play(2, cut={1})
    assert (standing.bad, standing.open, len(trials)) == (set(), {0, 1}, 1)


def test_of_two_nodes_the_one_that_computes_slowly_is_named():
    """Each computes alone, so this can be told; it is measured twice."""
    standing, trials = play(2, lame={1})
    assert (standing.bad, len(trials)) == ({1}, 2)


def test_where_all_pairs_fail_nobody_is_named():
    """It is the network, or how it is set."""
    standing, _ = play(5, cut=set(range(5)))
    assert (standing.bad, standing.cleared, standing.open) == (set(), set(), set(range(5)))


def test_a_way_between_two_sound_nodes():
    """They fail with one another and go well with others: the way is named, neither node is."""
    trials = [Trial(0, (0, 1), None), Trial(0, (2, 3), 0.02), Trial(1, (0, 2), 0.02), Trial(1, (1, 3), 0.02)]
    standing = judge(range(4), trials)
    assert (standing.bad, standing.open, standing.ways) == (set(), set(), ((0, 1),))
    assert not next_pairs(range(4), trials)


def test_what_a_busy_machine_adds_is_not_taken_for_a_slow_node():
    """Seen between three sound nodes on a machine with four tasks for each processor."""
    trials = [Trial(0, (0, 1), 0.0075), Trial(1, (0, 2), 0.0187), Trial(2, (1, 2), 0.0187)]
    standing = judge(range(3), trials)
    assert (standing.bad, standing.cleared) == (set(), {0, 1, 2})


def test_one_slow_trial_is_no_slow_node():
    """The second one tells."""
    trials = [Trial(0, (0, 1), 0.3), Trial(0, (2, 3), 0.02)]
    assert next_pairs(range(4), trials) == ((0, 2), (1, 3))
    trials += [Trial(1, (0, 2), 0.02), Trial(1, (1, 3), 0.02)]
    assert not judge(range(4), trials).bad


@pytest.mark.parametrize(("seconds", "usual"), [([], None), ([0.5], 0.5), ([3, 1], 1), ([9, 9, 1, 1, 2, 1, 1, 9], 1)])
def test_what_is_usual(seconds, usual):
    """A few bad pairs do not move it; pairs that failed do not count."""
    trials = [Trial(0, (2 * n, 2 * n + 1), s) for n, s in enumerate([*seconds, None])]
    assert usual_seconds(trials).get(("gloo",)) == usual


H, A = "NVIDIA H100", "NVIDIA A100"


def of_gpus(number, first, second, seconds, models, rates=None):
    """Return the trial of a pair of nodes with GPUs."""
    pair = (first, second)
    own = {node: models[node] for node in pair}
    return Trial(number, pair, seconds, rates=rates or {}, models=own, backend="nccl")


def test_nccl_is_measured_by_its_own_times():
    """256 MiB in 12 ms instead of 5: half of the network is gone, and 50 ms would hide it. A jitter is no fault."""
    models = dict.fromkeys(range(4), H)
    first = [of_gpus(0, 0, 1, 0.012, models), of_gpus(0, 2, 3, 0.005, models)]
    bad = [*first, of_gpus(1, 0, 2, 0.012, models), of_gpus(1, 1, 3, 0.005, models)]
    assert judge(range(4), bad).slow == {0}
    jitter = [of_gpus(0, 0, 1, 0.0015, models), of_gpus(0, 2, 3, 0.0005, models)]
    assert judge(range(4), jitter).cleared == {0, 1, 2, 3}


def test_a_slower_model_is_no_slow_node():
    """Within a model nodes are compared, for products and for reductions."""
    models = {0: H, 1: H, 2: H, 3: A, 4: A, 5: A}
    rates = {node: 50.0 if model == H else 20.0 for node, model in models.items()}
    pairs = [(0, 0, 1), (0, 2, 3), (0, 4, 5), (1, 0, 2), (1, 3, 4), (1, 1, 5)]

    def tried(rates):
        took = {(H, H): 0.005, (A, H): 0.02, (A, A): 0.02}
        return [
            of_gpus(
                number,
                one,
                two,
                took[tuple(sorted((models[one], models[two])))],
                models,
                {n: rates[n] for n in (one, two)},
            )
            for number, one, two in pairs
        ]

    standing = judge(range(6), tried(rates))
    assert (standing.bad, standing.cleared, standing.open) == (set(), set(range(6)), set())
    assert judge(range(6), tried({**rates, 4: 8.0})).bad == {4}


def test_nodes_without_gpus_are_not_compared_with_those_that_have_some():
    """In one round some pairs compute on GPUs, others on processors."""
    models = {0: H, 1: H, 2: "EPYC", 3: "EPYC"}
    for_gpus = [of_gpus(n, 0, 1, 0.005, models, {0: 50.0, 1: 50.0}) for n in (0, 1)]
    others = [Trial(n, (2, 3), 0.02, rates={2: 4.0, 3: 4.0}, models={2: "EPYC", 3: "EPYC"}) for n in (0, 1)]
    assert judge(range(4), [*for_gpus, *others]).bad == set()
