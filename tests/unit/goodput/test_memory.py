"""The memory of ranks: what goes on growing is reported, with its rate and its end; what levels off is not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.words import GIB, MIB
from resilience_sdk.goodput.memory import MemorySamples, growing_words, growth_of, memory_of, ranks_of

BASE = 2 * GIB


def test_a_leak_is_reported_by_its_rate() -> None:
    """Eleven MiB a step, on top of what the first steps take."""
    points = [(step, BASE + 11 * MIB * step + (GIB if step > 3 else 0)) for step in range(60)]
    assert growth_of(points) == pytest.approx(11 * MIB, rel=0.05)


@given(slope=st.floats(0.1, 1000.0), period=st.integers(2, 12), depth=st.floats(0.0, 3.0), seed=st.integers(0, 1 << 30))
def test_what_is_taken_and_given_back_hides_no_leak_and_makes_none(
    slope: float, period: int, depth: float, seed: int
) -> None:
    """A saw of any tooth and some noise: the rate is that of the leak, and without one there is none."""
    draw = random.Random(seed)
    saw = [depth * slope * MIB * (step % period) + draw.uniform(0, 0.2 * slope * MIB) for step in range(400)]
    leak = [(step, int(BASE + slope * MIB * step + tooth)) for step, tooth in enumerate(saw)]
    growth = growth_of(leak)
    assert growth is not None
    assert growth == pytest.approx(slope * MIB, rel=0.2)
    assert growth_of([(step, int(BASE + tooth)) for step, tooth in enumerate(saw)]) is None


@given(part=st.floats(0.02, 0.5), most=st.floats(1.0, 1000.0))
def test_what_levels_off_is_no_growth(part: float, most: float) -> None:
    """A cache that fills: by ever less, to an end that is seen."""
    points = [(step, int(BASE + most * GIB * (1 - math.exp(-step / (part * 200))))) for step in range(200)]
    assert growth_of(points) is None


def test_a_cache_that_is_full_in_the_middle_is_no_growth() -> None:
    """It grows by as much in each step of the first epoch, and then no more."""
    assert growth_of([(step, BASE + 10 * MIB * min(step, 100)) for step in range(200)]) is None


def test_little_is_no_growth() -> None:
    """Of some megabytes, or of some steps, nobody can tell."""
    assert growth_of([(step, BASE + 4096 * step) for step in range(300)]) is None
    assert growth_of([(step, BASE + 100 * MIB * step) for step in range(8)]) is None
    assert growth_of([]) is None
    assert growth_of([(7, BASE)] * 40) is None


@given(st.lists(st.integers(1, 50), max_size=600))
def test_samples_stay_few_and_in_order(steps: list[int]) -> None:
    """However long a run is; the growth is still that of the whole."""
    samples, step = MemorySamples(), 0
    for more in steps:
        step += more
        samples.add(step, BASE + 5 * MIB * step)
    assert len(samples.points) <= 64
    assert samples.points == sorted(samples.points)
    if len(samples.points) >= 32:
        assert samples.growth == pytest.approx(5 * MIB, rel=0.01)


def test_a_run_that_went_back_begins_anew() -> None:
    """Behind a rollback the steps are done again."""
    samples = MemorySamples()
    for step in [*range(50), *range(10, 20)]:
        samples.add(step, BASE)
    assert [step for step, _ in samples.points] == list(range(10, 20))


def an_event(*ranks: dict[str, object], host: str = "node-a", attempt: int = 0, **values: object) -> dict[str, object]:
    return {"event": "memory", "t": 1.0, "job": "j", "attempt": attempt, "host": host, "ranks": list(ranks), **values}


def test_the_ranks_of_a_node_fill_its_memory_together() -> None:
    """Two that grow have half the steps that one would have."""
    one = {"rank": 0, "host": GIB, "host_peak": GIB, "host_growth": MIB}
    [alone] = ranks_of(an_event(one, left=1000 * MIB))
    both = ranks_of(an_event(one, {**one, "rank": 1}, left=1000 * MIB))
    assert alone.steps_left == 1000
    assert [rank.steps_left for rank in both] == [500, 500]
    assert growing_words([alone]) == ["rank 0 grows 1 MiB a step: full in about 1,000 steps"]


def test_the_device_may_be_full_first() -> None:
    """Its own memory is what counts there."""
    told = {"rank": 3, "host": GIB, "host_peak": 2 * GIB, "host_growth": MIB}
    device = {"device": 60 * GIB, "device_peak": 70 * GIB, "device_total": 80 * GIB, "device_growth": 64 * MIB}
    [rank] = ranks_of(an_event({**told, **device}, left=1000 * GIB))
    assert rank.words() == "1 GiB (peak 2 GiB), 60 GiB on its device (peak 70 GiB of 80 GiB)"
    assert rank.growth_words() == "rank 3 grows 1 MiB a step and 64 MiB a step on its device: full in about 320 steps"


def test_the_newest_attempt_counts() -> None:
    """Each node has told of its own ranks; those of the attempt before are gone."""
    first = {"rank": 0, "host": GIB, "host_peak": GIB}
    events = [
        an_event({**first, "host": 9 * GIB}),
        an_event({"rank": 5, "host": GIB}, host="node-b"),
        an_event(first, attempt=1),
        an_event({**first, "rank": 1}, host="node-b", attempt=1),
        an_event({**first, "host": 2 * GIB}, attempt=1),
    ]
    assert [(rank.rank, rank.host) for rank in memory_of(events)] == [(0, 2 * GIB), (1, GIB)]
    assert memory_of([*events, {"event": "run_start", "t": 2.0}]) == ()


@pytest.mark.parametrize("ranks", [None, "x", [None], [{"rank": "0"}], [{"rank": True}], [{}]])
def test_what_is_misshapen_is_left_out(ranks: object) -> None:
    """A journal is read by whoever may have written it."""
    assert ranks_of({"event": "memory", "ranks": ranks, "left": "much"}) == []
    [rank] = ranks_of({"event": "memory", "ranks": [{"rank": 1, "host": "12", "host_growth": -1.0, "device": None}]})
    assert (rank.words(), rank.growth_words()) == ("", None)
    [rank] = ranks_of(an_event({"rank": 1, "host_growth": math.inf, "device_growth": math.nan}, left=GIB))
    assert (rank.words(), rank.growth_words()) == ("", None)


def test_many_that_grow_are_counted() -> None:
    """The first to be full are named."""
    told = [{"rank": n, "host": GIB, "host_peak": GIB, "host_growth": MIB * (n + 1)} for n in range(5)]
    words = growing_words(ranks_of(an_event(*told, left=GIB)))
    assert len(words) == 2
    assert words[1].endswith("; 3 more grow as well")
