"""NVRx's straggler detector: what is timed, the scores of all ranks, and when it is time for a report."""

from __future__ import annotations

import math
import socket

import pytest
import torch

from resilience_sdk.adapters.nvrx.detector import (
    CallableId,
    Detector,
    DetectorReport,
    Kernels,
    ReportInterval,
    Statistic,
    StragglerId,
    scores_of,
    summary_of,
)


@pytest.fixture(autouse=True)
def ended():
    """Nothing is left of a test."""
    yield
    Detector.shutdown()


def sections_of(report):
    return {name: summary[Statistic.NUM] for name, summary in report.local_section_summaries.items()}


def test_it_is_no_object_and_begins_once():
    """As the original."""
    with pytest.raises(RuntimeError, match="should not be instantiated"):
        Detector()
    with pytest.raises(RuntimeError, match="not initialized"):
        Detector.generate_report()
    with pytest.raises(RuntimeError, match="not initialized"):
        Detector.detection_section("a")
    Detector.initialize()
    assert Detector.initialized
    with pytest.raises(AssertionError):
        Detector.initialize()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores_to_compute": ["relative_scores"]}, "scores_to_compute=.*expected relative_perf_scores"),
        ({"scores_to_compute": []}, "scores_to_compute="),
        ({"profiling_interval": 0}, "profiling_interval=0: expected"),
    ],
)
def test_what_would_give_no_scores_is_refused(options, message):
    """At once: reports without any would look as if nobody was slow."""
    with pytest.raises(ValueError, match=message):
        Detector.initialize(**options)
    assert not Detector.initialized


def test_one_kind_of_scores_may_be_asked_for():
    """As a text or in a list; the others are not there."""
    for scores in ("individual_perf_scores", ["individual_perf_scores"]):
        Detector.initialize(scores)
        with Detector.detection_section("fwd"):
            pass
        report = Detector.generate_report()
        assert report.section_relative_perf_scores == report.gpu_relative_perf_scores == {}
        assert report.section_individual_perf_scores["fwd"] == {0: 1.0}
        Detector.shutdown()


def test_sections_are_timed_and_forgotten_after_a_report(recording):
    """Each is one of the SDK, too; one that raises counts for nothing, one without a name has that of its place."""
    Detector.initialize(node_name="n1")
    for _ in range(3):
        with Detector.detection_section("fwd", profile_cuda=False):
            assert [section.name for section in recording.snapshot().main_lane.stack] == ["fwd"]
    with pytest.raises(KeyError), Detector.detection_section("fwd"):
        raise KeyError
    with Detector.detection_section():
        pass
    report = Detector.generate_report()
    assert report.rank_to_node == {0: "n1"}
    counts = sections_of(report)
    assert counts.pop("fwd") == 3
    [(place, count)] = counts.items()
    assert __file__ in place
    assert count == 1
    assert Detector.generate_report().local_section_summaries == {}


def test_one_rank_alone_is_as_fast_as_the_fastest():
    """Of a GPU nothing is known here, which flags nobody."""
    Detector.initialize()
    for _ in range(3):
        with Detector.detection_section("fwd"):
            pass
    report = Detector.generate_report()
    assert report.section_relative_perf_scores == {"fwd": {0: 1.0}}
    assert report.section_individual_perf_scores == {"fwd": {0: 1.0}}
    assert all(
        map(math.isnan, (*report.gpu_relative_perf_scores.values(), *report.gpu_individual_perf_scores.values()))
    )
    assert not any(report.identify_stragglers().values())


def test_of_so_many_passes_one_is_timed():
    """Of each section."""
    Detector.initialize(profiling_interval=2)
    for _ in range(4):
        with Detector.detection_section("a"):
            pass
    with Detector.detection_section("b"):
        pass
    assert sections_of(Detector.generate_report()) == {"a": 2, "b": 1}


class Model:
    def __init__(self):
        self.calls = 0

    def forward(self, times=1):
        self.calls += times
        return self.calls

    @staticmethod
    def still(value):
        return value

    @classmethod
    def name(cls):
        return cls.__name__


def test_callables_are_wrapped_and_given_back():
    """Of an object, of a class as static and class methods, and of a module; wrapped in two calls, too."""
    Detector.initialize()
    model, before = Model(), dict(vars(Model))
    Detector.wrap_callables([CallableId(model, "forward")])
    Detector.wrap_callables(
        [CallableId(Model, "still"), CallableId(Model, "name"), CallableId(socket, "gethostname", ignored_args=())]
    )
    assert model.forward(times=2) == 2
    assert (Model.still(3), model.still(4), Model.name(), model.name()) == (3, 4, "Model", "Model")
    assert socket.gethostname()
    module = Model.__module__
    assert sections_of(Detector.generate_report()) == {
        "Model.forward": 1,
        f"{module}.Model.still": 2,
        f"{module}.Model.name": 2,
        "socket.gethostname": 1,
    }
    Detector.restore_original_callables()
    assert dict(vars(Model)) == before
    assert "forward" not in vars(model)
    model.forward()
    assert Detector.generate_report().local_section_summaries == {}


def made(**scores):
    tables = ("gpu_relative", "section_relative", "gpu_individual", "section_individual")
    values = {f"{table}_perf_scores": {} for table in tables} | scores
    return DetectorReport(
        **values,
        rank_to_node={rank: f"n{rank}" for rank in range(4)},
        local_section_summaries={},
        local_kernel_summaries={},
        generate_report_elapsed_time=0.0,
        gather_on_rank0=True,
        rank=0,
    )


def test_who_is_below_a_threshold():
    """A score that is it is not below; no score is below none."""
    report = made(
        gpu_relative_perf_scores={0: 1.0, 1: 0.75, 2: 0.74, 3: math.nan},
        section_individual_perf_scores={"a": {0: 0.5}, "b": {0: 1.0}},
    )
    assert report.identify_stragglers() == {
        "straggler_gpus_relative": {StragglerId(2, "n2")},
        "straggler_gpus_individual": set(),
        "straggler_sections_relative": {},
        "straggler_sections_individual": {"a": {StragglerId(0, "n0")}},
    }
    assert not any(report.identify_stragglers(gpu_rel_threshold=0.7, section_indiv_threshold=0.5).values())


def test_the_time_between_reports_is_counted_in_iterations():
    """16 of them tell how many; the slow first ones do not; all ranks take what the slowest clock says."""
    interval = ReportInterval(0.5)
    now = 0.0
    interval.step(now)
    for took in [0.1] * 7 + [0.01] * 9:
        assert interval.estimate() is None
        now += took
        interval.step(now)
    assert interval.estimate() == pytest.approx(50)
    interval.agree([interval.estimate(), 60.0, None])
    assert interval.iterations == 60
    counted = 17
    while not interval.is_elapsed:
        interval.step(now)
        counted += 1
    assert counted == 60
    interval.begin_anew()
    interval.step(now)
    assert not interval.is_elapsed


def test_a_report_comes_by_itself():
    """Its interval is estimated anew with each, and asked for afterwards."""
    Detector.initialize(report_time_interval=0.0)
    found = [Detector.generate_report_if_interval_elapsed() is not None for _ in range(20)]
    assert found == [False] * 17 + [True] * 3
    assert Detector.is_interval_elapsed()


def test_figures_of_durations():
    """Of one there is no spread."""
    assert summary_of([1.0, 2.0, 6.0])[Statistic.MED] == 2
    assert summary_of([1.0, 2.0, 6.0])[Statistic.STD] == pytest.approx(2.6457, abs=1e-3)
    assert math.isnan(summary_of([1.0])[Statistic.STD])


ALL = ("relative_perf_scores", "individual_perf_scores")


def told_by(sections, kernels=(), individual=None, gpu=None):
    rows = [[name, 1, seconds, seconds] for name, seconds in kernels]
    return {"sections": sections, "kernels": rows, "individual": individual or {}, "gpu_individual": gpu}


def test_ranks_are_compared_with_the_fastest():
    """Sections and kernels alike; of one's own scores each rank tells its own."""
    by_rank = {r: told_by({"a": 0.01 * (r + 1)}, [("k", 1e-3 * (r + 1))], {"a": 0.5}, 0.25) for r in range(4)}
    found = scores_of(by_rank, by_rank, ALL)
    expected = {rank: pytest.approx(1 / (rank + 1)) for rank in range(4)}
    assert found["section_relative_perf_scores"] == {"a": expected}
    assert found["gpu_relative_perf_scores"] == expected
    assert found["section_individual_perf_scores"] == {"a": dict.fromkeys(range(4), 0.5)}
    assert found["gpu_individual_perf_scores"] == dict.fromkeys(range(4), 0.25)
    assert scores_of(by_rank, [2], ALL)["section_relative_perf_scores"] == {"a": {2: expected[2]}}
    assert scores_of(by_rank, by_rank, ALL[:1])["section_individual_perf_scores"] == {}


def test_what_one_rank_lacks_leaves_the_others_their_scores():
    """A section and a kernel that it has not run; it has no score in them, where the original has none for anybody."""
    by_rank = {r: told_by({"a": 0.01 * (1 + (r == 3))}, [("k", 1e-3)]) for r in range(4)}
    by_rank[0] = told_by({}, [("other", 1e-3)])
    found = scores_of(by_rank, by_rank, ALL)
    assert found["section_relative_perf_scores"]["a"] == {1: 1, 2: 1, 3: pytest.approx(0.5)}
    gpus = found["gpu_relative_perf_scores"]
    assert math.isnan(gpus.pop(0))
    assert gpus == {1: 1, 2: 1, 3: 1}


def test_one_rank_that_is_too_fast_makes_nobody_slow():
    """It has an early exit, say."""
    by_rank = {r: told_by({"a": 0.01 if r else 0.001}) for r in range(8)}
    assert set(scores_of(by_rank, by_rank, ALL)["section_relative_perf_scores"]["a"].values()) == {1.0}


def test_kernels_are_timed_in_three_passes_after_the_first():
    """Here the operators of a processor; what was taken is forgotten."""
    kernels = Kernels("CPU")
    begun = []
    for _ in range(6):
        begun.append(kernels.begin())
        torch.ones(4).add(1)
        if begun[-1]:
            assert not kernels.begin()  # in a section inside it
            kernels.end()
    assert sum(begun) == 3
    assert not begun[0]
    assert len(kernels.take()["aten::add"]) == 3
    assert kernels.take() == {}
    assert not Kernels().begin()


def test_no_kernels_are_timed_while_a_graph_is_captured(monkeypatch, capsys):
    """A window ends with a wait for the device, which would break the capture: none is even tried."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels = Kernels()
    assert [kernels.begin() for _ in range(3)] == [False] * 3
    assert capsys.readouterr().err == ""
