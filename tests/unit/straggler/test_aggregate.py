"""Collection and judging together: durations of simulated ranks in, verdicts in steps of the training out."""

from __future__ import annotations

import random

import attrs
import pytest

from resilience_sdk.straggler.detector import Aggregate
from resilience_sdk.straggler.kernels import KernelTime, KernelWindow
from resilience_sdk.straggler.window_messages import NodePieces, Piece, decode

from .cluster import STEP_S, Cluster, slow_rank


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_slow_rank_is_found_lasts_and_is_over_in_steps_of_the_training(nodes):
    """Steps are global where training resumed at 1,000; on whatever node the rank is."""
    cluster = Cluster(nodes, slow=slow_rank(2, since=40, until=140))
    cluster.first_step = 1000
    changes = cluster.run(240)
    assert [(c.what, c.verdict.kind, c.verdict.ranks, c.verdict.section) for c in changes] == [
        ("found", "transient", (2,), "bwd"),
        ("still", "persistent", (2,), "bwd"),
        ("over", "persistent", (2,), "bwd"),
    ]
    found, still, over = (change.verdict for change in changes)
    assert found.nodes == ("n0",)
    assert 1040 <= found.since_step <= 1048
    assert found.last_step <= 1061
    assert still.since_step == found.since_step
    assert 1130 <= over.until_step <= 1145
    assert found.excess_s == pytest.approx(0.05, rel=0.1)
    assert found.share == pytest.approx(0.05 / STEP_S, rel=0.1)


def test_micro_batches_and_rare_sections_cost_per_step_what_they_cost():
    """Four backward passes per step add up; a save every other step counts half."""
    sections = {"bwd": ("compute", 4), "comm_wait": ("comm", 4), "checkpoint": ("io", 0.5), "fwd": ("compute", 1)}
    bwd, save = slow_rank(1), slow_rank(2, "checkpoint", seconds=0.2)
    cluster = Cluster(sections=sections, slow=lambda *at: bwd(*at) + save(*at))
    cluster.run(120)
    by_section = {verdict.section: verdict for verdict in cluster.aggregate.verdicts}
    assert {(name, verdict.ranks) for name, verdict in by_section.items()} == {("bwd", (1,)), ("checkpoint", (2,))}
    assert by_section["bwd"].excess_s == pytest.approx(0.2, rel=0.1)
    assert by_section["checkpoint"].excess_s == pytest.approx(0.1, rel=0.1)
    assert by_section["bwd"].last_step <= 120
    assert by_section["checkpoint"].since_step <= 8


def test_the_waits_of_the_same_passes_corroborate():
    """A slow rank has the shortest wait: that is in the same window, on all nodes."""
    slow = slow_rank(5)
    cluster = Cluster(2, slow=lambda r, s, step: slow(r, s, step) + (0.05 if s == "comm_wait" and r != 5 else 0.0))
    cluster.run(80)
    (verdict,) = cluster.aggregate.verdicts
    assert (verdict.ranks, verdict.nodes, verdict.waits_least) == ((5,), ("n1",), True)


def test_ranks_that_never_report_or_begin_again_leave_the_rest_right():
    """One is mute from the start, one is replaced in the middle; the slow one is named, and only it."""
    cluster = Cluster(2, slow=slow_rank(6))
    cluster.mute = {1}
    cluster.run(60)
    cluster.restart(3)
    cluster.run(60)
    assert {change.verdict.ranks for change in cluster.changes} == {(6,)}
    report = cluster.aggregate.report(0.7, 0.7)
    assert set(report.section_relative["bwd"]) == {0, 2, 3, 4, 5, 6, 7}
    assert {(s.rule, s.rank, s.section) for s in report.stragglers} == {("section_relative", 6, "bwd")}


def test_ranks_of_another_role_are_not_compared():
    """The second stage has four times as much to do; within it, rank 7 is slow."""
    stage, slow = (lambda r, s, _: 0.03 if r > 3 and s == "bwd" else 0.0), slow_rank(7, seconds=0.02)
    cluster = Cluster(2, slow=lambda *at: stage(*at) + slow(*at))
    cluster.roles = {rank: f"stage-{rank // 4}" for rank in range(8)}
    cluster.run(80)
    assert {(v.ranks, v.role) for v in cluster.aggregate.verdicts} == {((7,), "stage-1")}
    assert {s.rank for s in cluster.aggregate.report(0.7, 0.7).stragglers} == {7}


def test_a_job_without_sections_still_tells_that_all_became_slower():
    """Only heartbeats: nobody is named, but a regression of all is seen."""
    cluster = Cluster(sections={}, slow=lambda r, s, step: 0.1 if step >= 160 else 0.0)
    changes = cluster.run(320)
    assert (changes[0].what, changes[0].verdict.section) == ("found", "step")
    assert 150 <= changes[0].verdict.since_step <= 176
    assert {(c.verdict.kind, c.verdict.ranks) for c in changes} == {("global", ())}


def test_two_roles_tell_amounts_of_their_own_and_one_of_them_becomes_slower():
    """Told by each rank in its node's message; the lengths of the other role have nothing to do with it."""
    length = {rank: random.Random(rank) for rank in (0, 5)}
    steps = [{rank: source.uniform(1.0, 4.0) for rank, source in length.items()} for _ in range(160)]

    def slow(rank, section, step):
        return 0.010 * steps[step][5] if rank >= 5 and section == "fwd" and step >= 96 else 0.0

    cluster = Cluster(nodes=2, ranks=5, slow=slow)
    cluster.roles = {rank: "encoder" if rank < 5 else "decoder" for rank in range(10)}
    cluster.lengths = lambda rank, step: steps[step][rank // 5 * 5]
    cluster.run(160)
    found = {(c.verdict.kind, c.verdict.section, c.verdict.role) for c in cluster.changes if c.what == "found"}
    assert found == {("global", "fwd", "decoder")}


def test_a_section_that_is_passed_more_often_from_now_on_stays_judged():
    """The number of micro-batches changes in the middle, while a rank is slow."""
    cluster = Cluster(sections={"bwd": ("compute", 1), "fwd": ("compute", 1)}, slow=slow_rank(1))
    cluster.run(80)
    cluster.sections = {"bwd": ("compute", 4), "fwd": ("compute", 1)}
    for _ in range(60):
        cluster.run(2)
        for verdict in cluster.aggregate.verdicts:
            assert (verdict.ranks, verdict.section) == ((1,), "bwd")
            assert 0 <= verdict.since_step <= verdict.last_step <= cluster.step
    assert len(cluster.aggregate.verdicts) == 1


def test_a_section_that_begins_late_and_one_with_a_heartbeat_of_its_own_are_weighed_by_the_steps_of_now():
    """After 2,000 steps without it, and beside an evaluation that beats a thousand times in between."""
    cluster = Cluster(sections={}, slow=slow_rank(1), every=40)
    cluster.run(2_000)
    cluster.sections, cluster.every = {"bwd": ("compute", 1)}, 2
    cluster.run(30)
    for rank in range(4):
        for start in range(0, 960, 32):
            cluster.collectors[0].add(rank, "eval", "heartbeat", 0, start, [1_000_000] * 32)
    cluster.run(30)
    (verdict,) = cluster.aggregate.verdicts
    assert verdict.ranks == (1,)
    assert verdict.excess_s == pytest.approx(0.05, rel=0.1)
    assert verdict.share == pytest.approx(0.05 / STEP_S, rel=0.1)
    assert verdict.since_step == pytest.approx(2_000, abs=3)


def test_what_is_said_about_a_section_ends_when_it_is_passed_no_more():
    """The program is in another phase. While it is passed now and then only, it stands."""
    sections = {"bwd": ("compute", 1), "fwd": ("compute", 1), "save": ("io", 0.05)}
    bwd, save = slow_rank(1), slow_rank(2, "save", seconds=2.0)
    cluster = Cluster(sections=sections, slow=lambda *at: bwd(*at) + save(*at))
    cluster.run(500)
    assert {(v.section, v.ranks) for v in cluster.aggregate.verdicts} == {("bwd", (1,)), ("save", (2,))}
    assert cluster.aggregate.verdicts[-1].excess_s == pytest.approx(0.1, rel=0.01)
    del cluster.sections["bwd"]
    (over,) = (change for change in cluster.run(160) if change.verdict.section == "bwd")
    assert over.what == "over"
    assert over.verdict.until_step <= 500
    assert {v.section for v in cluster.aggregate.verdicts} == {"save"}


def test_all_is_over_when_nobody_is_compared_any_more():
    """Each verdict once."""
    cluster = Cluster(slow=slow_rank(1))
    cluster.run(80)
    (over,) = cluster.aggregate.end()
    assert (over.what, over.verdict.ranks, over.verdict.until_step) == ("over", (1,), over.verdict.last_step)
    assert (cluster.aggregate.verdicts, cluster.aggregate.end()) == ((), [])


def test_a_stall_in_a_rare_section_is_one():
    """20 s more than the others in a save every 10 steps are 80 steps' time; a bit more than they need is not."""
    late = {400: 20.0, 800: 0.7}
    cluster = Cluster(
        sections={"fwd": ("compute", 1), "save": ("io", 0.1)},
        slow=lambda r, s, step: late.get(step, 0.0) if (r, s) == (2, "save") else 0.0,
    )
    found = [change.verdict for change in cluster.run(1000) if change.what == "found"]
    assert [(v.section, v.ranks) for v in found] == [("save", (2,))]
    assert 320 <= found[0].since_step <= 410


def test_of_very_many_ranks_one_section_is_judged_at_a_time(monkeypatch):
    """The monitor looks at its ranks in between; all is judged in the end, the waits first."""
    monkeypatch.setattr("resilience_sdk.straggler.detector._AT_ONCE", 4)
    at_once = Cluster(slow=slow_rank(1))
    sizes = []
    judge = at_once.aggregate._judge_of_all.add
    monkeypatch.setattr(
        at_once.aggregate._judge_of_all, "add", lambda window: sizes[-1].append(window.sections) or judge(window)
    )
    for _ in range(60):
        sizes.append([])
        at_once.look()
    assert max(map(len, sizes)) == 1
    judged = [windows[0][0].name for windows in sizes if windows]
    assert judged[:3] == ["comm_wait", "fwd", "bwd"]
    assert [v.ranks for v in at_once.aggregate.verdicts] == [(1,)]


@pytest.mark.parametrize("often", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_counts_as_one_per_step(often):
    """What another node says is distrusted, and costs nobody the comparison."""
    aggregate = Aggregate(1)
    rows = {rank: ",".join(["0.03" if rank == 2 else "0.01"] * 8) for rank in range(8)}
    changes = []
    for index in range(8):
        piece = Piece("fwd", "compute", index, 8 * index + 1, 8 * index + 8, often, 0.1, rows)
        aggregate.add(decode(NodePieces(0, 0, "n0", index, (piece,)).to_text()))
        changes += aggregate.judge()
    assert [(change.what, change.verdict.ranks) for change in changes] == [("found", (2,)), ("still", (2,))]


def test_a_window_of_kernels_counts_once():
    """However often it is told; the next one counts."""
    cluster = Cluster()
    cluster.run(40)

    def tell(window, median_s):
        kernels = {rank: KernelWindow(window, (KernelTime("gemm", 8, median_s, 8 * median_s),)) for rank in range(4)}
        told = decode(NodePieces(0, 0, "n0", 1, (), {}, kernels).to_text())
        cluster.aggregate.add(told)
        return cluster.aggregate.report(0.7, 0.7)

    assert tell(1, 1e-3).gpu_individual == dict.fromkeys(range(4), 1.0)
    assert tell(1, 1e-3) is None
    assert tell(2, 2e-3).gpu_individual == dict.fromkeys(range(4), 0.5)


def test_a_report_is_over_what_came_since_the_last_one():
    """And None where nothing came."""
    cluster = Cluster()
    assert cluster.aggregate.report(0.7, 0.7) is None
    cluster.run(40)
    report = cluster.aggregate.report(0.7, 0.7)
    assert (report.ranks, report.first_step) == (4, 1)
    assert set(report.section_relative) == {"fwd", "bwd"}  # waiting and the step itself score nobody
    assert cluster.aggregate.report(0.7, 0.7) is None


def test_a_report_goes_as_far_as_any_section_in_it():
    """The window of a rarer section, which ended before, comes last."""
    aggregate = Aggregate(1)
    for index in range(4):
        tell(aggregate, float(index), piece("fwd", index))
    tell(aggregate, 5.0, attrs.evolve(piece("save", 0, often=0.5), first_step=3, last_step=18))
    assert (aggregate.report(0.7, 0.7).first_step, aggregate.report(0.7, 0.7)) == (1, None)
    for index in range(4, 6):
        tell(aggregate, float(index), piece("fwd", index))
    tell(aggregate, 7.0, attrs.evolve(piece("save", 1, often=0.5), first_step=19, last_step=34))
    assert aggregate.report(0.7, 0.7).last_step == 48


def test_what_a_step_would_not_notice_is_not_listed():
    """4.7 ms of a step of 250 ms are less than 2 %; in each of four micro-batches they are more. By each score."""

    def slow(rank, section, step):
        return 0.0047 if rank == 1 and section != "step" and step >= 64 else 0.0

    cluster = Cluster(sections={"fwd": ("compute", 1), "micro": ("compute", 4)}, slow=slow)
    cluster.run(64)
    cluster.aggregate.report(0.7, 0.7)
    cluster.run(64)
    report = cluster.aggregate.report(0.7, 0.7)
    assert report.section_relative["fwd"][1] < 0.7
    assert report.section_individual["fwd"][1] < 0.7
    listed = {(s.rule, s.rank, s.section) for s in report.stragglers}
    assert listed == {("section_relative", 1, "micro"), ("section_individual", 1, "micro")}


def piece(name, index, slow=None, often=1.0, step_s=0.15, by=1.08):
    """A window of eight ranks, of which `slow` takes `by` times as long; the passes of index 0 begin with step 1."""
    rows = {rank: ",".join([f"{0.1 * (by if rank == slow else 1.0):.4g}"] * 8) for rank in range(8)}
    first = 1 + int(8 * index / often)
    return Piece(name, "compute", index, first, first + int(8 / often) - 1, often, step_s, rows)


def tell(aggregate, now_s, *pieces):
    """Judge a message of one node."""
    aggregate.add(decode(NodePieces(0, 0, "n0", int(now_s * 10), pieces).to_text()))
    return aggregate.judge()


@pytest.mark.parametrize("behind", [0, 12])
def test_it_began_where_it_did_however_the_windows_of_other_sections_come(behind):
    """With steps of seconds each section's window comes by itself; one that began late has numbers of its own."""
    since = {}
    for others in ((), ("fwd", "optim")):
        aggregate = Aggregate(1)
        changes = []
        for index in range(behind, 28):
            first = 8 * index + 1
            slow = 3 if index >= 20 else None
            changes += tell(aggregate, 40.0 * index, piece("bwd", index, slow, by=1.035))
            for at, name in enumerate(others, 1):
                late = attrs.evolve(piece(name, index - behind), first_step=first, last_step=first + 7)
                changes += tell(aggregate, 40.0 * index + 10.0 * at, late)
        since[others] = changes[0].verdict.since_step
    assert since[()] == since["fwd", "optim"] <= 161


def test_it_began_where_it_did_when_a_section_is_passed_more_often_from_then_on():
    """The number of micro-batches changes while a verdict stands."""
    aggregate = Aggregate(1)
    for index in range(12):
        tell(aggregate, float(index), piece("bwd", index, slow=3))
    for index in range(12, 16):
        later = attrs.evolve(
            piece("bwd", index, slow=3, often=4.0), first_step=73 + 2 * index, last_step=74 + 2 * index
        )
        tell(aggregate, float(index), later)
    (verdict,) = aggregate.verdicts
    assert (verdict.since_step, verdict.last_step) == (1, 104)


def test_without_heartbeats_a_section_that_is_passed_less_often_is_judged():
    """The optimizer steps after every 16th micro-batch, and no heartbeat tells the steps."""
    cluster = Cluster(sections={"bwd": ("compute", 1), "optim": ("compute", 1 / 16)}, slow=slow_rank(1, "optim"))
    cluster.has_beats = False
    changes = cluster.run(16 * 90)
    assert [(c.what, c.verdict.section, c.verdict.ranks) for c in changes[:2]] == [
        ("found", "optim", (1,)),
        ("still", "optim", (1,)),
    ]
    assert len(cluster.aggregate.verdicts) == 1


def test_without_heartbeats_what_is_said_about_a_section_ends_too():
    """The program is in another phase."""
    cluster = Cluster(sections={"bwd": ("compute", 1), "fwd": ("compute", 1)}, slow=slow_rank(1))
    cluster.has_beats = False
    cluster.run(200)
    del cluster.sections["bwd"]
    (over,) = cluster.run(1600)
    assert (over.what, over.verdict.section) == ("over", "bwd")


def test_a_loop_that_has_become_too_fast_to_be_judged_leaves_no_verdict_behind():
    """Steps of 8 ms because of a slow rank, of 4 ms without it."""
    aggregate = Aggregate(1)
    changes = []
    for index in range(16):
        slow, step_s = (3, 0.008) if index < 6 else (None, 0.004)
        changes += tell(aggregate, float(index), piece("bwd", index, slow, step_s=step_s))
    assert [change.what for change in changes] == ["found", "still", "over"]
    assert changes[-1].verdict.until_step == 48
