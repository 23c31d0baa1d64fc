"""Shares of a step, from what pages tell, and the one sentence that they carry."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilience_sdk.goodput.slowness import slowness_of, standing_of
from resilience_sdk.goodput.step_time import (
    NodeProgress,
    RankSteps,
    WorkFit,
    is_data,
    is_save,
    is_stop,
    measures_data,
    node_facts,
    step_time_of,
)
from resilience_sdk.recorder.page_reader import LanePasses

MS = 1_000_000


def a_rank(sections: Mapping[tuple[str, str], float], *, steps: int = 100, step_ms: float = 100.0) -> RankSteps:
    """Return a rank whose steps of `step_ms` have these parts, in ms; it is looked at once per ten steps."""
    rank = RankSteps()
    rank.take([LanePasses(name, kind, 0, 0, [MS]) for name, kind in sections], 1, 0)
    for at in range(0, steps, 10):
        passes = [
            LanePasses(name, kind, 0, 1 + at, [int(ms * MS)] * 10) for (name, kind), ms in sections.items()
        ]  # fmt: skip
        rank.take(passes, 1 + at + 10, int((at + 10) * step_ms * MS))
    return rank


def told(*ranks: RankSteps, host: str = "a", attempt: int = 0, first: int = 0, **more: Any) -> dict[str, Any]:
    """Return the event of a node."""
    facts = node_facts({first + rank: steps for rank, steps in enumerate(ranks)})
    assert facts is not None
    return {"event": "step_time", "t": 1000.0, "job": "j", "attempt": attempt, "host": host, **facts, **more}


def why(*ranks: RankSteps, verdicts: list[dict[str, Any]] | None = None) -> str | None:
    """Return the cause that is told of one node's ranks."""
    slow = slowness_of(step_time_of([told(*ranks)]), verdicts or [])
    return None if slow is None else slow.cause


STEP = ("step", "heartbeat")
DATA, SAVE, WAIT = ("data", "io"), ("checkpoint", "io"), ("comm_wait", "comm")
FWD, BWD, OPTIM = ("fwd", "compute"), ("bwd", "compute"), ("optim", "compute")
ON_GPU = ("bwd", "gpu")
HEALTHY = {STEP: 95.0, DATA: 4.0, FWD: 30.0, BWD: 50.0, OPTIM: 8.0, WAIT: 5.0, SAVE: 1.0}


@given(st.integers(1, 200), st.lists(st.integers(1, 5), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_sums_are_those_of_all_passes(per_look: int, looks: list[int]) -> None:
    """Also of those that the ring of the page has lost between two looks, which count as the ones that are there."""
    rank, count = RankSteps(), 1
    rank.take([], 1, 0)
    for times in looks:
        new = per_look * times
        kept = min(new, 63)
        rank.take([LanePasses("data", "io", 0, count + new - kept, [2 * MS] * kept)], 1 + count + new, count * 10 * MS)
        count += new
    assert rank.seconds["data", "io"] == pytest.approx((count - 1) * 0.002, rel=0.02, abs=0.0021)


def test_what_comes_before_the_first_step_is_not_counted() -> None:
    """A first batch takes what it takes."""
    rank = RankSteps()
    rank.take([LanePasses("data", "io", 0, 0, [9000 * MS])], 0, 0)
    rank.take([LanePasses("step", "heartbeat", 0, 0, [5000 * MS])], 1, 14_000 * MS)
    rank.take([LanePasses("data", "io", 0, 1, [20 * MS])], 2, 14_100 * MS)
    assert (rank.steps, rank.wall_s, rank.seconds) == (1, pytest.approx(0.1), {("data", "io"): pytest.approx(0.02)})


@pytest.mark.parametrize("seen_at_start", [False, True])
def test_steps_before_the_first_look_count_if_all_of_them_are_known(seen_at_start: bool) -> None:
    """An attempt may be over before its monitor looks twice; what came before the first step counts neither then."""
    rank = RankSteps()
    if seen_at_start:
        rank.take([LanePasses("data", "io", 0, 0, [9000 * MS])], 0, 0)
    data = LanePasses("data", "io", 0, 1, [2 * MS] * 20)
    if not seen_at_start:
        data = data._replace(start=0, samples_ns=[9000 * MS, *data.samples_ns])
    beats = LanePasses("step", "heartbeat", 0, 0, [9001 * MS] + [10 * MS] * 20)
    rank.take([data, beats], 21, 9201 * MS, 9001 * MS)
    assert (rank.steps, rank.wall_s, rank.longest_s) == (20, pytest.approx(0.2), pytest.approx(0.01))
    assert rank.seconds["data", "io"] == pytest.approx(0.04)


def test_who_comes_late_counts_from_then_on() -> None:
    """A monitor that takes over from another one tells nothing twice."""
    rank = RankSteps()
    rank.take([LanePasses("step", "heartbeat", 0, 437, [10 * MS] * 63)], 500, 14_000 * MS, 9_000 * MS)
    rank.take([LanePasses("step", "heartbeat", 0, 500, [10 * MS])], 501, 14_010 * MS, 9_000 * MS)
    assert (rank.steps, rank.wall_s) == (1, pytest.approx(0.01))


def test_other_threads_hold_no_step_up() -> None:
    """The lane that beats counts."""
    rank = a_rank(HEALTHY)
    rank.take(
        [LanePasses("step", "heartbeat", 0, 101, [90 * MS]), LanePasses("prefetch data", "io", 3, 0, [900 * MS])],
        102, 10_100 * MS,
    )  # fmt: skip
    assert ("prefetch data", "io") not in rank.seconds


def test_other_threads_hold_no_step_up_while_a_step_takes_longer_than_a_look() -> None:
    """A look in which nothing has beaten knows the lane that beats all the same."""
    rank = a_rank(HEALTHY)
    rank.take([LanePasses("data", "io", 3, 0, [900 * MS]), LanePasses("fwd", "compute", 0, 101, [30 * MS])], 101, 0)
    assert rank.seconds["data", "io"] == pytest.approx(0.4)
    assert rank.seconds["fwd", "compute"] == pytest.approx(3.03)


def test_sections_of_one_name_on_two_threads_are_counted_apart() -> None:
    """Before anything has beaten, nobody knows which of them is the step's."""
    rank = RankSteps()
    rank.take([], 1, 0)
    rank.take([LanePasses("data", "io", 1, 0, [MS] * 60)], 1, 0)
    rank.take([LanePasses("step", "heartbeat", 0, 1, [MS]), LanePasses("data", "io", 0, 0, [MS] * 5)], 2, 10 * MS)
    assert rank.seconds["data", "io"] == pytest.approx(0.065)


@pytest.mark.parametrize(
    ("name", "kind", "data", "save"),
    [
        ("data", "io", True, False), ("data", "compute", True, False), ("val data", "io", True, False),
        ("get_batch", "compute", True, False), ("load_data", "compute", True, False), ("fetch", "compute", True, False),
        ("train_batch", "compute", False, False), ("data_parallel", "compute", False, False),
        ("batch", "compute", False, False), ("batch_norm", "compute", False, False),
        ("input_projection", "compute", False, False), ("data", "comm", False, False),
        ("checkpoint", "io", False, True), ("save", "compute", False, True), ("save_model", "compute", False, True),
        ("activation_checkpoint", "compute", False, False), ("checkpointed_layers", "compute", False, False),
    ],
)  # fmt: skip
def test_what_computes_is_neither_data_nor_a_save(name: str, kind: str, data: bool, save: bool) -> None:
    """Whatever words its name has: the sentence is never a guess."""
    assert (is_data(name, kind), is_save(name, kind)) == (data, save)


def test_two_nodes_are_told_as_one() -> None:
    """Shares are means over all ranks; a section that a node lacks took it nothing; a new attempt begins anew."""
    few, many = a_rank({STEP: 90.0, DATA: 60.0}), a_rank({STEP: 90.0, DATA: 10.0, SAVE: 20.0})
    old = told(a_rank({STEP: 99.0}, steps=50), attempt=0)
    found = step_time_of([old, told(few, attempt=1), told(many, many, many, host="b", attempt=1, first=1)])
    assert found is not None
    assert (found.attempt, found.ranks, found.steps, found.step_s) == (1, 4, 100, pytest.approx(0.1))
    shares = {section.name: (section.share, section.least, section.most, section.rank) for section in found.sections}
    assert shares["data"] == (pytest.approx((0.6 + 3 * 0.1) / 4), pytest.approx(0.1), pytest.approx(0.6), 0)
    assert shares["checkpoint"] == (pytest.approx(0.15), 0.0, pytest.approx(0.2), 1)
    assert step_time_of([told(few), {"event": "run_start", "t": 1001.0}]) is None


@pytest.mark.parametrize(
    ("parts", "cause", "words"),
    [
        (HEALTHY, None, ""),
        (
            {STEP: 38.0, DATA: 61.0, FWD: 12.0},
            "data",
            "61% of the step waits for data on all ranks (section data)",
        ),
        (
            HEALTHY | {STEP: 80.0, SAVE: 18.0},
            "checkpoint",
            "saves take 18% of the time since the first step (section checkpoint)",
        ),
        (HEALTHY | {WAIT: 60.0, BWD: 10.0, FWD: 8.0}, "communication", "60% of the step is communication on all ranks"),
        (HEALTHY | {OPTIM: 55.0, BWD: 20.0, FWD: 10.0}, "small_batch", "55% of the step is the optimizer's"),
        ({STEP: 40.0, FWD: 20.0, BWD: 18.0, ("eval", "compute"): 50.0}, None, ""),
        ({STEP: 95.0, FWD: 20.0, OPTIM: 70.0, ON_GPU: 60.0}, None, ""),
        (
            {STEP: 40.0, FWD: 20.0},
            "between",
            "60% of the time since the first step passes between two steps, outside of heartbeat()",
        ),
        ({STEP: 95.0, FWD: 40.0, BWD: 45.0, ON_GPU: 17.0}, "small_batch", "the GPU works 17%"),
        ({STEP: 95.0, FWD: 40.0, BWD: 45.0, ON_GPU: 85.0}, None, ""),
        ({("optimizer", "pulse"): 100.0}, None, ""),
    ],
)
def test_the_sentence_names_what_was_measured(
    parts: dict[tuple[str, str], float], cause: str | None, words: str
) -> None:
    """And a healthy step, or one of which nothing is known, has none."""
    slow = slowness_of(step_time_of([told(a_rank(parts), a_rank(parts))]))
    assert (None if slow is None else slow.cause) == cause
    assert slow is None or slow.text.startswith(words)


def test_a_save_between_two_steps_is_not_told_as_a_wait_for_data() -> None:
    """Where the loop is known to wait little, and nothing measures its saves."""
    slow = slowness_of(step_time_of([told(a_rank({STEP: 6.0, DATA: 4.0, FWD: 4.0}))]))
    assert slow is not None
    assert slow.cause == "between"
    assert slow.text.startswith(
        "90% of the time since the first step passes between two steps, outside of heartbeat(), and is no wait for "
    )
    assert "iterate" not in slow.text


def test_it_is_known_whether_waits_for_data_are_measured() -> None:
    """In some attempt at least."""
    assert measures_data([{"event": "run_start", "t": 1.0}]) is None
    assert measures_data([told(a_rank({STEP: 90.0}))]) is False
    assert measures_data([told(a_rank({STEP: 90.0, DATA: 3.0})), told(a_rank({STEP: 90.0}), attempt=1)]) is True


def test_one_rank_that_waits_for_its_data_is_named() -> None:
    """The others wait for it in their collectives."""
    late = a_rank({STEP: 60.0, DATA: 40.0})
    slow = slowness_of(step_time_of([told(*[a_rank(HEALTHY | {WAIT: 40.0})] * 7, late)]))
    assert slow is not None
    assert (slow.cause, slow.evidence["rank"]) == ("data", 7)
    assert slow.text.startswith("rank 7 waits for its data 40% of the step")


def test_a_verdict_on_a_slow_rank_is_told_as_long_as_it_stands() -> None:
    """Once persistent; not a transient one, nor one that costs little, nor one that is over or of an attempt before."""
    verdict = {
        "event": "straggler", "what": "found", "kind": "persistent", "section": "fwd", "role": "", "ranks": [1],
        "nodes": ["b"], "ratio": 2.0, "share": 0.3, "text": "rank 1 (node b): section fwd takes 2.0 times as long",
    }  # fmt: skip
    stands = standing_of([verdict])
    slow = slowness_of(step_time_of([told(*[a_rank(HEALTHY)] * 2)]), stands)
    assert slow is not None
    assert (slow.cause, slow.share) == ("slow_rank", 0.3)
    assert slow.text.startswith("all ranks wait for rank 1 (node b): section fwd")
    assert why(a_rank(HEALTHY), verdicts=[verdict | {"share": 0.02}]) is None
    assert standing_of([verdict | {"kind": "transient"}]) == []
    assert standing_of([verdict, verdict | {"what": "over"}]) == []
    assert standing_of([verdict, {"event": "attempt_start"}]) == []


@pytest.mark.parametrize(("steps", "step_ms"), [(10, 1000.0), (40, 10.0)])
def test_too_little_is_no_evidence(steps: int, step_ms: float) -> None:
    """Below 20 steps, or 5 seconds of them."""
    parts = {STEP: 0.3 * step_ms, DATA: 0.7 * step_ms}
    assert why(a_rank(parts, steps=steps, step_ms=step_ms)) is None


@pytest.mark.parametrize(("fixed_ms", "cause"), [(80.0, "small_batch"), (10.0, None)])
def test_time_that_does_not_grow_with_the_work_is_a_small_batch(fixed_ms: float, cause: str | None) -> None:
    """Steps of 50 to 150 samples, 0.2 ms each, beside what every step takes; the throughput is told."""
    draw, pace_ms = random.Random(0), fixed_ms + 22
    rank = a_rank({STEP: 0.97 * pace_ms}, steps=10, step_ms=pace_ms)
    for at in range(11, 400):
        amount = draw.uniform(50, 150)
        took = int((fixed_ms + 0.2 * amount + draw.gauss(0, 1)) * MS)
        (word,) = struct.unpack("Q", struct.pack("d", amount))
        rank.take([LanePasses("step", "heartbeat", 0, at, [took])], at + 1, int(at * pace_ms * MS))
        rank.take([LanePasses("steps", "work", 0, at, [word])], at + 1, int(at * pace_ms * MS))
    event = told(rank)
    assert event["work_per_s"] == pytest.approx(100_000 / pace_ms, rel=0.1)
    assert event["fixed_share"] == pytest.approx(fixed_ms / (fixed_ms + 20), abs=0.05)
    slow = slowness_of(step_time_of([event]))
    assert (None if slow is None else slow.cause) == cause


def test_work_that_the_ring_has_lost_counts_as_the_rest() -> None:
    """Of 1,000 steps between two looks, the page has 64."""
    rank = RankSteps()
    rank.take([], 1, 0)
    (word,) = struct.unpack("Q", struct.pack("d", 8.0))
    rank.take([LanePasses("steps", "work", 0, 937, [word] * 64)], 1001, 1_000 * MS)
    assert told(rank)["work_per_s"] == pytest.approx(8_000, rel=0.01)


def test_a_step_in_ten_may_be_of_another_kind() -> None:
    """One of ten seconds, say, in which something was saved; what is noise has no line."""
    draw, fit, noise = random.Random(0), WorkFit(), WorkFit()
    for number in range(100):
        amount = draw.uniform(10, 190)
        fit.add(amount, 10.0 if number % 12 == 0 else 0.07 + 0.0001 * amount + draw.gauss(0, 0.001))
        noise.add(amount, draw.gauss(0.1, 0.02))
    assert fit.fixed_share() == pytest.approx(0.875, abs=0.02)
    assert noise.fixed_share() is None


@given(st.lists(st.tuples(st.floats(1e-300, 1e18), st.floats(0, 1e10)), max_size=80))
def test_no_points_are_too_odd(points: list[tuple[float, float]]) -> None:
    """A page may hold anything; a share is one, or none."""
    fit = WorkFit()
    for point in points:
        fit.add(*point)
    assert 0 <= (fit.fixed_share() or 0.0) <= 1


@example({"sections": ""})
@given(
    st.dictionaries(st.sampled_from(["steps", "wall_s", "ranks", "sections", "work_per_s"]), st.none() | st.text("ab"))
)
def test_an_event_that_is_misshapen_is_left_out(changes: dict[str, Any]) -> None:
    """Of another version, or of somebody else."""
    found = step_time_of([told(a_rank(HEALTHY)) | changes])
    assert found is None or not changes.keys() & {"steps", "wall_s", "ranks", "sections"}


def test_progress_is_what_was_done_since_it_was_told_last() -> None:
    """Own time is that of sections in which a rank works: neither waits, nor what holds collectives."""
    told = NodeProgress()
    quick, slow, silent = a_rank(HEALTHY), a_rank(HEALTHY | {FWD: 60.0}), a_rank({STEP: 95.0})
    first = told.take({0: quick, 1: slow, 2: silent})
    assert first == {
        "steps": 100, "wall_s": 10.0, "mean_ms": 100.0, "longest_ms": 100.0, "ranks": [0, 1, 2],
        "own_ms": [93.0, 123.0, None],
    }  # fmt: skip
    assert told.take({0: quick, 1: slow, 2: silent}) is None
    passes = [LanePasses("step", "heartbeat", 0, 101, [150 * MS]), LanePasses("fwd", "compute", 0, 101, [70 * MS])]
    passes.append(LanePasses("bwd", "compute", 0, 101, [500 * MS], is_joint=True))
    quick.take(passes, 102, int(10_160 * MS))
    second = told.take({0: quick, 1: slow, 2: silent})
    assert second is not None
    assert (second["steps"], second["mean_ms"], second["longest_ms"]) == (1, 160.0, 160.0)
    assert second["own_ms"][1:] == [None, None]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_what_is_told_adds_up_to_what_was_done(looks: list[int]) -> None:
    """However often it is told, and whatever came before the first step."""
    rank, progress, steps, own_ms, count = RankSteps(), NodeProgress(), 0, 0.0, 1
    rank.take([LanePasses("fwd", "compute", 0, 0, [9000 * MS])], 1, 0)
    for new in looks:
        rank.take([LanePasses("fwd", "compute", 0, count, [7 * MS] * new)], count + new, (count + new) * 10 * MS)
        count += new
        facts = progress.take({0: rank})
        assert (facts is None) == (new == 0)
        if facts is not None:
            steps += facts["steps"]
            own_ms += facts["steps"] * facts["own_ms"][0]
    assert (steps, own_ms) == (sum(looks), pytest.approx(7.0 * sum(looks), rel=1e-3))


def stopped(
    section: tuple[str, str], *, between: bool = False, halves: bool = False, beats_first: bool = False
) -> RankSteps:
    """Return a rank that stood for 40 s in its 51st step: in that section, or between two steps.

    With `halves` the monitor looks once more while the step goes on and the section is over; with `beats_first` it has
    seen that the step is over at a look whose passes were of the moment before.
    """
    rank = a_rank(HEALTHY, steps=50)
    rank.note_stop(11.0)
    rank.note_stop(39.5)
    now = 51 * 100 + 40_000
    passes = {key: ms + 40_000 * (key == section or (key == STEP and not between)) for key, ms in HEALTHY.items()}
    of_step = [LanePasses(*key, 0, 51, [int(ms * MS)]) for key, ms in passes.items()]
    if halves:
        early = [one for one in of_step if one.name == section[0]]
        rank.take(early, 51, 50 * 100 * MS)
        rank.note_stop(39.9)
        of_step = [one for one in of_step if one not in early]
    if beats_first:
        rank.take([], 52, now * MS)
    rank.take(of_step, 52, now * MS)
    for at in range(52, 101):
        usual = [LanePasses(*key, 0, at, [int(ms * MS)]) for key, ms in HEALTHY.items()]
        rank.take(usual, at + 1, (now + (at - 51) * 100) * MS)
    return rank


@pytest.mark.parametrize("rank", [
    stopped(FWD), stopped(FWD, halves=True), stopped(FWD, beats_first=True),
    stopped(FWD, halves=True, beats_first=True), stopped(WAIT), stopped(DATA, between=True),
])  # fmt: skip
def test_a_stop_is_no_time_of_a_step_nor_of_a_section(rank: RankSteps) -> None:
    """Of who was stopped, and of who waited for it: shares, mean and longest step are those of the other steps."""
    usual, found = node_facts({0: a_rank(HEALTHY)}), node_facts({0: rank})
    assert usual is not None
    assert found is not None
    assert (found["steps"], found["wall_s"]) == (100, pytest.approx(10.0, abs=0.02))
    shares = {one["name"]: one["share"] for one in usual["sections"]}
    assert {one["name"]: one["share"] for one in found["sections"]} == pytest.approx(shares, abs=0.005)
    progress = NodeProgress().take({0: rank})
    assert progress is not None
    assert (progress["mean_ms"], progress["longest_ms"]) == (pytest.approx(100.0, abs=0.2), pytest.approx(100.0, abs=1))
    assert progress["own_ms"] == [pytest.approx(93.0, abs=0.5)]


def test_a_step_takes_what_the_newest_ones_took() -> None:
    """Of an attempt that has become faster, where the newest `progress` tells of ten steps and more."""
    event = told(a_rank(HEALTHY))
    progress = {**event, "event": "progress", "t": 1001.0, "steps": 36, "wall_s": 1.8}
    few, other = {**progress, "t": 1002.0, "steps": 9}, {**progress, "t": 1003.0, "attempt": 1}
    for events, recent_s in (([event], 0.1), ([progress, event, few, other], 0.05), ([event, few], 0.1)):
        steps = step_time_of(events)
        assert steps is not None
        assert (steps.step_s, steps.recent_s) == (pytest.approx(0.1), pytest.approx(recent_s))


def test_a_long_step_after_a_stop_counts() -> None:
    """A rank that has completed a step after it is over the stop."""
    rank = stopped(FWD)
    rank.take([LanePasses(*SAVE, 0, 101, [60_000 * MS]), LanePasses(*STEP, 0, 101, [60_095 * MS])], 102, 110_200 * MS)
    assert rank.seconds[SAVE] > 60.0
    assert rank.wall_s > 60.0


@pytest.mark.parametrize(
    ("activity", "section", "stops"),
    [
        ("stopped", "data", True), ("stuck", "fwd", True), ("stuck", None, True), ("stuck", "checkpoint", False),
        ("busy", "fwd", False), ("waiting", None, False),
    ],
)  # fmt: skip
def test_who_loads_or_works_for_long_has_not_stopped(activity: str, section: str | None, stops: bool) -> None:
    """What is a stop is decided once, for the account and for what steps take."""
    assert is_stop(activity, section) is stops
