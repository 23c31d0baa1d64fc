"""The judge names who is slow, when it is, and nobody else."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.straggler.verdicts import Rules, confidence
from resilience_sdk.straggler.windowing import RankPlace, SectionWindow

from .windows import Fleet, slow, what


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 40])
def test_a_slow_rank_is_named_within_twenty_steps(ranks: int):
    """Wherever in a window it begins, in small and larger jobs."""
    for phase in range(8):
        fleet = Fleet(ranks)
        fleet.run(8)
        onset = fleet.step + phase
        assert what(fleet.run(3, slow(1, by=3.0, since=onset))) == [("found", "transient", (1,))]
        verdict = fleet.changes[-1].verdict
        assert verdict.last_step - onset < 20
        assert abs(verdict.since_step - onset) <= 8
        assert verdict.ratio >= 1.7  # its first window is half slow
        fleet.run(2, slow(1, by=3.0))
        (verdict,) = fleet.judge.verdicts
        assert verdict.ratio == pytest.approx(3.0, rel=0.05)
        assert verdict.excess_s == pytest.approx(0.020, rel=0.1)
        assert (verdict.section, verdict.nodes, verdict.whole_node) == ("fwd", ("n0",), False)


@pytest.mark.parametrize("ranks", [2, 4, 5, 8])
def test_a_rank_that_is_slow_from_the_start_is_named_at_once(ranks: int):
    """There is nothing to compare with but the others."""
    assert what(Fleet(ranks).run(2, slow(0, by=20.0))) == [("found", "transient", (0,))]


@pytest.mark.parametrize(("judged_before", "unseen", "told"), [
    (8, 56, "since step 120 or up to 56 steps before ("), (0, None, "since step 56 or before ("),
])  # fmt: skip
def test_a_verdict_says_where_it_may_have_begun_unseen(judged_before: int, unseen: int | None, told: str):
    """Of many ranks only some windows are judged: since when it is so is known as well as those tell."""
    fleet = Fleet(8)
    fleet.run(judged_before)
    fleet.step += 56
    (found,) = fleet.run(2, slow(3, by=2.0))
    assert (found.verdict.since_step, found.verdict.unseen_steps) == (8 * judged_before + 56, unseen)
    assert told in found.verdict.text()
    assert (
        f"{told.removeprefix('since').removesuffix('(')}to 135 (" in attrs.evolve(found.verdict, until_step=135).text()
    )
    fleet = Fleet(8)
    fleet.run(8)
    (found,) = fleet.run(2, slow(3, by=2.0))
    assert "since step 64 (" in found.verdict.text()


def test_a_healthy_fleet_has_no_verdict():
    """A hundred windows of jitter."""
    for ranks in (1, 2, 4, 8, 16):
        assert Fleet(ranks).run(100) == []


def test_what_lasts_becomes_persistent_and_what_ends_is_over():
    """Found, still, over: each once."""
    fleet = Fleet(8)
    fleet.run(8)
    since, until = fleet.step, fleet.step + 80
    assert what(fleet.run(16, slow(3, since=since, until=until))) == [
        ("found", "transient", (3,)),
        ("still", "persistent", (3,)),
        ("over", "persistent", (3,)),
    ]
    over = fleet.changes[-1].verdict
    assert (over.since_step, over.until_step) == (since, until - 1)
    assert fleet.judge.verdicts == ()


def test_what_clears_soon_was_transient():
    """Four windows of slowness."""
    fleet = Fleet(8)
    fleet.run(8)
    found = fleet.run(12, slow(3, since=fleet.step, until=fleet.step + 32))
    assert what(found) == [("found", "transient", (3,)), ("over", "transient", (3,))]


def test_a_node_is_named_as_a_whole():
    """All ranks of it are slow: one verdict, and none about its ranks."""
    for nodes in (2, 3, 8):
        fleet = Fleet({rank: RankPlace(f"n{rank // 4}") for rank in range(4 * nodes)})
        fleet.run(10)
        (found,) = fleet.run(4, slow(4, 5, 6, 7, since=fleet.step))
        assert what([found]) == [("found", "transient", (4, 5, 6, 7))]
        assert found.verdict.whole_node
        assert found.verdict.nodes == ("n1",)


def test_one_slow_rank_is_not_its_node():
    """However slow it is."""
    fleet = Fleet({rank: RankPlace(f"n{rank // 2}") for rank in range(4)})
    fleet.run(10)
    fleet.run(5, slow(1, by=9.0))
    assert {change.verdict.ranks for change in fleet.changes} == {(1,)}
    assert not any(change.verdict.whole_node for change in fleet.changes)


def test_everybody_slower_at_once_is_a_global_regression_without_culprits():
    """And it is over when it is."""
    fleet = Fleet(8)
    fleet.run(20)
    since, until = fleet.step, fleet.step + 120
    changes = fleet.run(25, slow(*range(8), since=since, until=until))
    assert what(changes) == [("found", "global", ()), ("over", "global", ())]
    assert abs(changes[0].verdict.since_step - since) <= 8
    assert changes[0].verdict.ratio == pytest.approx(1.1, abs=0.01)


def test_a_single_rank_has_its_own_history():
    """Twenty percent slower than before, in a job of one; five percent is too little to be sure."""
    fleet = Fleet(1)
    fleet.run(20)
    assert what(fleet.run(8, slow(0, by=1.2))) == [("found", "global", (0,))]
    other = Fleet(1)
    other.run(20)
    assert other.run(20, slow(0, by=1.05)) == []


def test_sequences_of_all_lengths_alarm_nobody():
    """The length of a step is common to all ranks; and where each has its own, that is no fault either."""
    for ranks in (2, 4, 8, 16):
        fleet = Fleet(ranks)
        length = lambda rank, step: 1.0 + 3.0 * ((step * 7919) % 97) / 97  # noqa: E731
        assert fleet.run(60, length) == []
        own = lambda rank, step: 1.0 + 3.0 * ((step * 7919 + rank * 104729) % 97) / 97  # noqa: E731
        assert Fleet(ranks).run(60, own) == []


def test_a_slow_rank_is_found_under_sequences_of_all_lengths():
    """Ten percent, where the steps of all differ fourfold."""
    fleet = Fleet(8)
    length = lambda rank, step: 1.0 + 3.0 * ((step * 7919) % 97) / 97  # noqa: E731
    fleet.run(10, length)
    found = fleet.run(4, lambda rank, step: length(rank, step) * (1.1 if rank == 5 else 1.0))
    assert what(found) == [("found", "transient", (5,))]


@pytest.mark.parametrize("kind", ["comm", "idle", "heartbeat"])
def test_time_with_a_collective_in_it_names_nobody(kind: str):
    """Its length is that of the slowest, or the reverse."""
    fleet = Fleet(8)
    fleet.run(5, kind=kind)
    assert not any(change.verdict.ranks for change in fleet.run(12, slow(2, by=3.0), kind=kind))


def test_the_shortest_wait_corroborates_and_a_long_one_contradicts():
    """Confidence follows; the wait alone names nobody."""
    sure = {}
    for name, wait in (("least", 0.001), ("unknown", math.nan), ("as long", 0.031)):
        fleet = Fleet(8)
        for _ in range(5):
            bwd = SectionWindow("bwd", "compute", fleet.durations(slow(2, by=3.0)))
            waits = {rank: [0.030] * 8 for rank in range(8)} | {2: [wait] * 8}
            fleet.show(bwd, SectionWindow("comm_wait", "comm", waits))
        (verdict,) = fleet.judge.verdicts
        sure[name] = verdict.confidence, verdict.waits_least
    assert [waits for _, waits in sure.values()] == [True, None, False]
    assert sure["least"][0] > sure["unknown"][0] > sure["as long"][0]


def test_a_wait_that_is_measured_twice_is_one_wait():
    """In wall time and on the device: 6 ms less is no corroboration of 20 ms."""
    fleet = Fleet(8)
    for _ in range(5):
        bwd = SectionWindow("bwd", "compute", fleet.durations(slow(2, by=3.0)))
        waits = {rank: [0.030] * 8 for rank in range(8)} | {2: [0.024] * 8}
        both = (SectionWindow("comm_wait", kind, waits) for kind in ("comm", "gpu_comm"))
        fleet.show(bwd, *both)
    (verdict,) = fleet.judge.verdicts
    assert verdict.waits_least is None


def test_what_one_of_many_ranks_does_is_no_regression_of_all():
    """Rank 0 saves, and takes twice as long from now on; of four ranks that do it, half of all, it is one."""
    for savers, found in ((1, []), (4, [("found", "global", ())])):
        fleet = Fleet(8)
        for _ in range(40):
            rows = fleet.durations(lambda _, step: 2.0 if step > 160 else 1.0)
            fleet.show(SectionWindow("save", "io", {rank: rows[rank] for rank in range(savers)}))
        assert what(fleet.changes) == found


def test_ranks_are_compared_within_their_role():
    """A stage that has three times the work; and one slow rank in it."""
    stages = {rank: RankPlace("n", "last" if rank >= 8 else "first") for rank in range(16)}
    fleet = Fleet(stages)
    work = lambda rank, step: 3.0 if rank >= 8 else 1.0  # noqa: E731
    assert fleet.run(10, work) == []
    (found,) = fleet.run(4, lambda rank, step: work(rank, step) * (1.2 if rank == 9 else 1.0))
    assert (found.verdict.ranks, found.verdict.role) == ((9,), "last")


def test_one_abnormally_fast_rank_makes_nobody_slow():
    """In the rule of the fastest rank it makes stragglers of all others."""
    for ranks in (3, 4, 8):
        assert Fleet(ranks).run(30, slow(0, by=0.2)) == []


def test_one_lucky_window_makes_nobody_slow():
    """Neither before nor after it."""
    fleet = Fleet(8)
    assert fleet.run(40, lambda rank, step: 0.2 if rank == 3 and 80 <= step < 88 else 1.0) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_pulses_of_a_stopped_process_are_transient(ranks: int):
    """SIGSTOP for a second, twice: no window's median shows it. Two ranks are enough."""
    fleet = Fleet(ranks)
    fleet.run(4)
    pulses = lambda rank, step: 101.0 if rank == 1 and step in (35, 45) else 1.0  # noqa: E731
    changes = fleet.run(8, pulses)
    assert what(changes) == [("found", "transient", (1,)), ("over", "transient", (1,))]
    assert changes[0].verdict.excess_s == pytest.approx(1.0 / 8, rel=0.1)


@pytest.mark.parametrize(("times", "found"), [(3.1, []), (5.5, [("found", "transient", (3,))])])
def test_a_spike_of_a_step_that_is_long_on_all_ranks_is_no_stall(times: float, found: list[object]):
    """A long sequence, seven times the usual: three times as long as the others is a spike there."""
    fleet = Fleet(8)
    fleet.run(4, lambda rank, step: 10.0)
    at = fleet.step + 3
    assert what(fleet.run(1, lambda r, step: 10.0 if step != at else 70.0 * (times if r == 3 else 1.0))) == found


def test_a_rank_that_stalls_and_is_slow_then_has_one_verdict():
    """That of its stall is over, as is said first: who acts on verdicts would take the end of one for that of both."""
    fleet = Fleet(8)
    fleet.run(4)
    stall = fleet.step + 3
    slower = lambda rank, step: 1.0 if rank != 2 or step < stall else 101.0 if step == stall else 1.5  # noqa: E731
    found, over, slow_now = fleet.run(3, slower)
    assert what([found, over, slow_now]) == [
        ("found", "transient", (2,)),
        ("over", "transient", (2,)),
        ("found", "transient", (2,)),
    ]
    assert fleet.run(4, slower)[-1].verdict.kind == "persistent"
    assert len(fleet.judge.verdicts) == 1


def test_in_a_larger_fleet_a_single_stall_is_nobodys():
    """Somebody always stalls once; twice is another matter."""
    fleet = Fleet(40)
    fleet.run(4)
    assert fleet.run(8, lambda rank, step: 101.0 if rank == 2 and step == 35 else 1.0) == []
    twice = (fleet.step + 3, fleet.step + 20)
    assert what(fleet.run(4, lambda rank, step: 101.0 if rank == 2 and step in twice else 1.0)) == [
        ("found", "transient", (2,))
    ]


def test_what_nobody_would_notice_is_not_reported():
    """Half as slow again, in a section that takes a thousandth of the step."""
    fleet = Fleet(8)
    for _ in range(10):
        section = SectionWindow("zero_grad", "compute", fleet.durations(slow(1, by=1.5)))
        fleet.show(section, SectionWindow("step", "heartbeat", {rank: [10.0] * 8 for rank in range(8)}))
    assert fleet.changes == []


@pytest.mark.parametrize("passes", [1, 4])
def test_sections_of_microseconds_are_nobodys_fault(passes: int):
    """A lone 0.1 ms in a step takes one rank, then all, twice as long: nobody is named. Ten times as long: they are."""
    for times, found in ((2.0, False), (10.0, True)):
        fleet = Fleet(8)
        for window in range(40):
            slower = slow(*range(8) if window >= 20 else (3,) if 4 <= window < 12 else (), by=times)
            rows = {rank: [0.01 / passes * v for v in row] for rank, row in fleet.durations(slower).items()}
            fleet.show(SectionWindow("zero_grad", "compute", rows), passes_per_step=passes)
        whom = [(change.what, change.verdict.ranks) for change in fleet.changes if change.what == "found"]
        assert whom == ([("found", (3,)), ("found", ())] if found else [])


def test_rules_can_be_changed_while_it_runs():
    """With a higher bound it says less."""
    fleet = Fleet(8, Rules(spans=((2, 2.0),)))
    assert fleet.run(5, slow(1, by=2.0)) == []
    fleet.judge.rules = attrs.evolve(fleet.judge.rules, spans=Rules().spans)
    assert what(fleet.run(1, slow(1, by=2.0))) == [("found", "persistent", (1,))]


def test_device_and_wall_time_of_a_section_are_two_measures():
    """The same name twice, with kinds of its own."""
    fleet = Fleet(8)
    for _ in range(4):
        fleet.show(
            SectionWindow("fwd", "compute", fleet.durations()), SectionWindow("fwd", "gpu", fleet.durations(slow(1)))
        )
    (verdict,) = fleet.judge.verdicts
    assert (verdict.section_kind, verdict.ranks) == ("gpu", (1,))
    assert "fwd on the GPU" in verdict.text()


def test_confidence_by_its_formula():
    """As documented."""
    plain = {"z": 6.0, "needed_z": 6.0, "windows": 2, "few": False, "waits_least": None}
    assert confidence(**plain) == 0.6
    assert confidence(**plain | {"windows": 6}) == confidence(**plain | {"windows": 60}) == 0.8
    assert confidence(**plain | {"z": 12.0}) == 0.7
    assert confidence(**plain | {"waits_least": True}) == 0.7
    assert confidence(**plain | {"waits_least": False}) == 0.3
    assert confidence(**plain | {"z": 99.0, "windows": 6, "few": True, "waits_least": True}) == 0.7
    assert confidence(**plain | {"z": 99.0, "windows": 6, "waits_least": True}) == 0.99


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-3, 1e3), st.permutations(range(8)), st.integers(0, 7))
def test_units_and_numbering_do_not_matter(scale: float, order: list[int], culprit: int):
    """Ranks renumbered and durations in other units give the same verdict about the same rank."""
    # Without stalls and the least excess, which know seconds.
    plain, other = (Fleet(8, Rules(least_excess_s=0.0)) for _ in range(2))
    for _ in range(4):
        durations = plain.durations(slow(culprit))
        plain.show(SectionWindow("fwd", "compute", durations))
        renamed = {order[rank]: [scale * value for value in row] for rank, row in durations.items()}
        other.show(SectionWindow("fwd", "compute", {rank: renamed[rank] for rank in sorted(renamed)}))
    (a,), (b,) = plain.judge.verdicts, other.judge.verdicts
    assert (a.ranks, b.ranks) == ((culprit,), (order[culprit],))
    assert b.ratio == pytest.approx(a.ratio)
    assert b.z == pytest.approx(a.z)
    assert b.excess_s == pytest.approx(scale * a.excess_s)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 12), st.floats(1.0, 5.0), st.floats(1.0, 5.0), st.integers(0, 1000))
def test_slower_is_never_less_suspect(ranks: int, first: float, second: float, seed: int):
    """The z and the excess of a rank grow with how slow it is."""
    excess = {}
    for by in sorted((first, second)):
        fleet = Fleet(ranks, seed=seed)
        fleet.run(6, slow(1, by=by))
        excess[by] = next((v.ratio for v in fleet.judge.verdicts if v.ranks == (1,)), 0.0)
    assert excess[max(excess)] >= excess[min(excess)]
