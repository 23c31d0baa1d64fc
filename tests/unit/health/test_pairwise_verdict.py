"""Who tries a reduction with whom, who is named for what came of it, and what follows for the job."""

import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.health import Finding
from resilience_sdk.health.pairwise_verdict import (
    MAX_ROUNDS,
    NodeReport,
    Refusal,
    Trial,
    from_reports,
    from_trials,
    judge,
    next_pairs,
    together,
    usual_seconds,
)

SOUND_S, RATE = 0.1, 50.0


def play(count, *, cut=(), slow=(), lame=(), noise=lambda: 1.0, limit=MAX_ROUNDS):
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
    assert trials[-1].round < MAX_ROUNDS
    for trial in trials:
        assert trial.seconds is None or not set(trial.pair) & standing.failing


@pytest.mark.parametrize(
    ("count", "ill", "bad", "open_", "rounds"),
    [
        (2, {"cut": {1}}, set(), {0, 1}, 1),  # either may be the reason
        (2, {"lame": {1}}, {1}, set(), 2),  # each computes alone, so this can be told; it is measured twice
        (5, {"cut": set(range(5))}, set(), set(range(5)), MAX_ROUNDS),  # it is the network, or how it is set
    ],
)
def test_where_not_every_node_can_be_judged(count, ill, bad, open_, rounds):
    """Nobody is named for what may be another's."""
    standing, trials = play(count, **ill)
    assert (standing.bad, standing.open, trials[-1].round + 1) == (bad, open_, rounds)


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
    assert not judge(range(4), [*trials, Trial(1, (0, 2), 0.02), Trial(1, (1, 3), 0.02)]).bad


@pytest.mark.parametrize(("seconds", "usual"), [([], None), ([0.5], 0.5), ([3, 1], 1), ([9, 9, 1, 1, 2, 1, 1, 9], 1)])
def test_what_is_usual(seconds, usual):
    """A few bad pairs do not move it; pairs that failed do not count."""
    trials = [Trial(0, (2 * n, 2 * n + 1), s) for n, s in enumerate([*seconds, None])]
    assert usual_seconds(trials).get(("gloo",)) == usual


H, A = "NVIDIA H100", "NVIDIA A100"


def of_gpus(number, first, second, seconds, models, rates=()):
    """Return the trial of a pair of nodes with GPUs."""
    pair = (first, second)
    own, rates = ({node: of[node] for node in pair if node in of} for of in (models, dict(rates)))
    return Trial(number, pair, seconds, rates=rates, models=own, backend="nccl")


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

    took = {(H, H): 0.005, (A, H): 0.02, (A, A): 0.02}

    def tried(rates):
        return [of_gpus(*pair, took[tuple(sorted(models[node] for node in pair[1:]))], models, rates) for pair in pairs]

    standing = judge(range(6), tried(rates))
    assert (standing.bad, standing.cleared, standing.open) == (set(), set(range(6)), set())
    assert judge(range(6), tried({**rates, 4: 8.0})).bad == {4}


def test_nodes_without_gpus_are_not_compared_with_those_that_have_some():
    """In one round some pairs compute on GPUs, others on processors."""
    models = {0: H, 1: H, 2: "EPYC", 3: "EPYC"}
    for_gpus = [of_gpus(n, 0, 1, 0.005, models, {0: 50.0, 1: 50.0}) for n in (0, 1)]
    others = [Trial(n, (2, 3), 0.02, rates={2: 4.0, 3: 4.0}, models={2: "EPYC", 3: "EPYC"}) for n in (0, 1)]
    assert judge(range(4), [*for_gpus, *others]).bad == set()


NAMES = ("a", "b", "c", "d")
GOOD_S = 0.02


def version(torch):
    """Return what a node with this torch reports."""
    found = Finding(probe="software", check="torch", status="ok", data={"same": {"torch": torch}})
    return NodeReport(findings=(found,))


LOST, FULL = NodeReport(refusal=Refusal("bad GPU", True)), NodeReport(refusal=Refusal("no room", False))
NEW, OLD = version("2.8"), version("2.7")
OLD_AND_LOST = attrs.evolve(OLD, refusal=LOST.refusal)


@pytest.mark.parametrize(
    ("reports", "leave_out", "stop"),
    [
        ((NEW, NEW, OLD, NEW), {2: "another version than most of torch (2.8 on a, b and d; 2.7 on c)"}, ""),
        # Without a majority all stop.
        (
            (NEW, NEW, OLD, OLD),
            {},
            "no more than half of the nodes have the same torch (2.8 on a and b; 2.7 on c and d); ",
        ),
        # The version of a node that leaves does not count.
        ((NEW, NEW, OLD_AND_LOST), {2: "bad GPU"}, ""),
        ((NEW, OLD_AND_LOST), {1: "bad GPU"}, ""),
        # Who brings no report or refuses is left out, also for what may be the same everywhere where it is not.
        ((NodeReport(), LOST, None, FULL), {1: "bad GPU", 2: "it says nothing", 3: "no room"}, ""),
        # What most nodes refuse is for somebody to cure, and those with a fault of their own leave.
        ((FULL, LOST, FULL, FULL), {1: "bad GPU"}, "a: no room; c: no room; d: no room"),
    ],
)
def test_what_follows_from_the_reports(reports, leave_out, stop):
    """A node that says nothing is a finding."""
    told = {node: report for node, report in enumerate(reports) if report is not None}
    verdict = from_reports(NAMES[: len(reports)], told)
    assert (verdict.leave_out, verdict.stop[: len(stop)] == stop, bool(verdict.stop)) == (leave_out, True, bool(stop))
    answers = [finding.subject for finding in verdict.findings if finding.check == "answers"]
    assert answers == [NAMES[node] for node, report in enumerate(reports) if report is None]


def trials(*told, rates=None):
    """Return trials of (round, first, second, seconds)."""
    rates = rates or {}
    return [
        Trial(round_, (one, two), seconds, "" if seconds else "refused", {n: rates.get(n, 10.0) for n in (one, two)})
        for round_, one, two, seconds in told
    ]


@pytest.mark.parametrize(
    ("seconds", "rates", "check", "words"),
    [
        (None, {}, "all_reduce", "no all_reduce with d and c came about, others reduce with one another: refused"),
        (0.5, {}, "all_reduce_speed", "an all_reduce takes 500 ms with d and c, 20 ms among others"),
        (GOOD_S, {0: 3.0}, "compute_speed", "computes 3 products a second, others 10"),
    ],
)
def test_a_node_that_went_wrong_with_two(seconds, rates, check, words):
    """They go well with others; it is left out for that."""
    held = trials((0, 0, 3, seconds), (0, 1, 2, GOOD_S), (1, 0, 2, seconds), (1, 1, 3, GOOD_S), rates=rates)
    verdict = from_trials(NAMES, range(4), (), held)
    (finding,) = verdict.findings
    assert (finding.check, finding.subject, finding.stops, finding.evidence) == (check, "a", True, words)
    assert (verdict.leave_out, verdict.unnamed + verdict.stop) == ({0: words}, "")


BETWEEN = ((0, 0, 1, None), (0, 2, 3, GOOD_S), (1, 0, 2, GOOD_S), (1, 1, 3, GOOD_S))


@pytest.mark.parametrize(
    ("count", "held", "unnamed", "stop"),
    [
        (2, [(0, 0, 1, None)], "one of these two is the reason, which one cannot be told: refused (a and b)", ""),
        # Where every pair fails that has to be cured; between two sound nodes it is the way.
        (
            3,
            [(0, 0, 1, None), (1, 0, 2, None), (2, 1, 2, None)],
            "",
            "no all_reduce between any of these: refused (a, b and c)",
        ),
        (4, BETWEEN, "a and b: no all_reduce with one another came about, each reduces with others: refused", ""),
    ],
)
def test_where_nobody_can_be_named(count, held, unnamed, stop):
    """It is told what is wrong, and between whom."""
    verdict = from_trials(NAMES, range(count), (), trials(*held))
    assert (verdict.unnamed, verdict.stop, verdict.leave_out) == (unnamed, stop, {})
    assert [finding.check for finding in verdict.findings] == ["all_reduce"]


def test_both_parts_are_told_together():
    """What reports say, and what trials say."""
    before = from_reports(NAMES, dict.fromkeys(range(3), NodeReport()))
    verdict = together(before, from_trials(NAMES, range(2), (2,), trials((0, 0, 1, GOOD_S))))
    assert verdict.leave_out == {3: "it says nothing", 2: "it stopped to answer"}
    assert [finding.subject for finding in verdict.findings] == ["d", "c"]
    assert set(verdict.to_json()["leave_out"]) == {"2", "3"}
