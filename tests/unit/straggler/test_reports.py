"""The report: its printed form, its way as JSON, and what stays out of it."""

from __future__ import annotations

import attrs
import pytest

from resilience_sdk.straggler.reports import Medians, Report, ReportMaker
from resilience_sdk.straggler.verdicts import SlowVerdict
from resilience_sdk.straggler.windowing import RankPlace

from .test_scores import kernels

VERDICT = SlowVerdict(
    kind="persistent", section="bwd", section_kind="compute", role="", ranks=(2,), nodes=("n1",), whole_node=False,
    since_step=40, last_step=87, ratio=1.1, excess_s=0.01, share=0.05, z=9.5, windows=6, confidence=0.8,
    waits_least=True,
)  # fmt: skip


def maker(ranks: int) -> ReportMaker:
    return ReportMaker({rank: RankPlace(f"node-{rank // 8:03}") for rank in range(ranks)})


def test_the_printed_form_is_that_of_nemo():
    """Worst and best five of 512, ties broken as there, then the time that it took."""
    slower = {76: 0.106, 13: 0.1055, 45: 0.105, 433: 0.104, 308: 0.103}
    of_ranks = {rank: kernels(gemm=slower.get(rank, 0.1 + 1e-6 * rank)) for rank in range(512)}
    report = attrs.evolve(maker(512).make(Medians({}, of_ranks)), processing_s=0.042)
    assert report.text() == (
        "GPU relative performance:\n"
        " Worst performing 5/512 ranks:\n"
        "  Rank=76 Node=node-009 Score=0.94\n"
        "  Rank=13 Node=node-001 Score=0.95\n"
        "  Rank=45 Node=node-005 Score=0.95\n"
        "  Rank=433 Node=node-054 Score=0.96\n"
        "  Rank=308 Node=node-038 Score=0.97\n"
        " Best performing 5/512 ranks:\n"
        "  Rank=0 Node=node-000 Score=1.00\n"
        "  Rank=1 Node=node-000 Score=1.00\n"
        "  Rank=2 Node=node-000 Score=1.00\n"
        "  Rank=3 Node=node-000 Score=1.00\n"
        "  Rank=4 Node=node-000 Score=1.00\n"
        "\n"
        "GPU individual performance:\n"
        " Worst performing 5/512 ranks:\n"
        "  Rank=0 Node=node-000 Score=1.00\n"
        "  Rank=1 Node=node-000 Score=1.00\n"
        "  Rank=2 Node=node-000 Score=1.00\n"
        "  Rank=3 Node=node-000 Score=1.00\n"
        "  Rank=4 Node=node-000 Score=1.00\n"
        " Best performing 5/512 ranks:\n"
        "  Rank=511 Node=node-063 Score=1.00\n"
        "  Rank=510 Node=node-063 Score=1.00\n"
        "  Rank=509 Node=node-063 Score=1.00\n"
        "  Rank=508 Node=node-063 Score=1.00\n"
        "  Rank=507 Node=node-063 Score=1.00\n"
        "\n"
        "Straggler report processing time: 0.042 sec."
    )


def test_few_ranks_are_all_printed_worst_first():
    """With ten ranks or fewer there is no best and worst."""
    text = maker(4).make(Medians({"fwd": {0: 1.0, 1: 1.25, 2: 4.0, 3: 1.0}})).text()
    assert text.splitlines()[:5] == [
        "Section fwd relative performance:",
        "  Rank=2 Node=node-000 Score=0.25",
        "  Rank=1 Node=node-000 Score=0.80",
        "  Rank=0 Node=node-000 Score=1.00",
        "  Rank=3 Node=node-000 Score=1.00",
    ]
    assert "Below 0.7 in section relative performance: rank 2 (node-000) in fwd 0.25" in text


def test_nothing_to_say_is_said_with_no_scores():
    """`scores_to_print` 0: silence until somebody is slow."""
    report = maker(2).make(Medians({"fwd": {0: 1.0, 1: 1.0}}))
    assert report.text(0) == ""
    slow = maker(2).make(Medians({"fwd": {0: 1.0, 1: 3.0}}), (VERDICT,)).text(0)
    assert "Rank=" not in slow
    assert VERDICT.text() in slow
    assert "rank 1 (node-000) in fwd 0.33" in slow


def test_a_report_that_names_nobody_fits_into_a_line():
    """A section of microseconds names nobody, however low the score."""
    medians = Medians({"fwd": {0: 1.0, 1: 1.1}, "zero_grad": {0: 1e-4, 1: 4e-4}})
    report = maker(2).make(medians, first_step=9, last_step=480)
    assert not report.names_somebody
    assert report.section_relative["zero_grad"] == {0: 1.0, 1: 0.25}
    assert report.line() == "none of 2 ranks was slow in steps 9 to 480"
    assert maker(1).make(Medians({})).line() == "nobody was slow"
    assert maker(2).make(Medians({"fwd": {0: 1.0, 1: 3.0}})).names_somebody
    assert maker(2).make(medians, (VERDICT,)).names_somebody


def test_what_is_lost_must_be_noticed_in_a_step_by_each_rule():
    """The individual scores too: who loses 1 ms of a step of 100 ms is healthy, whatever it is compared with."""
    reports = maker(3)
    least = {"zero_grad": 0.002}
    reports.make(Medians({"zero_grad": {0: 1e-3, 1: 1e-3, 2: 1e-3}}, least_excess_s=least))
    report = reports.make(Medians({"zero_grad": {0: 1e-3, 1: 2e-3, 2: 4e-3}}, least_excess_s=least))
    assert report.section_individual["zero_grad"] == {0: 1.0, 1: 0.5, 2: 0.25}
    assert {(s.rule, s.rank) for s in report.stragglers} == {("section_relative", 2), ("section_individual", 2)}


def test_who_is_named_in_what():
    """By scores and by verdicts alike; everybody together, and a GPU, have no name of rank and section."""
    together = attrs.evolve(VERDICT, kind="global", ranks=(), section="fwd")
    medians = Medians({"fwd": {0: 1.0, 1: 3.0}}, {0: kernels(a=1.0), 1: kernels(a=4.0)})
    report = maker(2).make(medians, (VERDICT, together))
    assert report.named == {(1, "fwd"), (1, None), (2, "bwd"), (None, "fwd")}
    assert maker(2).make(Medians({"fwd": {0: 1.0, 1: 1.0}})).named == frozenset()


def test_many_verdicts_are_cut():
    """The printed form stays readable when a fleet falls apart."""
    text = maker(2).make(Medians({"fwd": {0: 1.0, 1: 1.0}}), (VERDICT,) * 20).text(0)
    assert text.count("Straggler: ") == 8
    assert "Stragglers: and 12 more verdicts" in text


def test_a_score_is_never_shown_as_nothing():
    """A rank that does something which takes the others no time has a very small one, not none."""
    text = maker(3).make(Medians({"save": {0: 4.0, 1: 2e-6, 2: 2e-6}})).text()
    assert "  Rank=0 Node=node-000 Score=5e-07\n" in text
    assert "0.00" not in text.partition("processing time")[0]


def test_stragglers_are_those_below_the_thresholds_by_each_rule():
    """The threshold itself is no straggler's score; individual and relative have their own."""
    reports, thresholds = maker(3), {"relative_threshold": 0.5, "individual_threshold": 0.9}
    reports.make(Medians({"fwd": {0: 1.0, 1: 2.0, 2: 2.0}}, {0: kernels(a=1.0), 1: kernels(a=1.0)}))
    report = reports.make(
        Medians({"fwd": {0: 1.0, 1: 2.0, 2: 2.5}}, {0: kernels(a=1.0), 1: kernels(a=4.0)}), **thresholds
    )
    assert [(s.rule, s.rank, s.section) for s in report.stragglers] == [
        ("gpu_relative", 1, None),
        ("gpu_individual", 1, None),
        ("section_relative", 2, "fwd"),
        ("section_individual", 2, "fwd"),
    ]
    lower = reports.make(Medians({"fwd": {0: 1.0, 1: 5.0}}), relative_threshold=0.1)
    assert not any(s.rule.endswith("relative") for s in lower.stragglers)


def test_ranks_of_different_roles_are_not_compared():
    """The last stage of a pipeline has more to do, and that is nobody's fault."""
    reports = ReportMaker({rank: RankPlace("n", "last" if rank > 1 else "first") for rank in range(4)})
    medians = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}
    report = reports.make(Medians({"fwd": medians}, {rank: kernels(a=value) for rank, value in medians.items()}))
    assert report.section_relative == {"fwd": dict.fromkeys(range(4), 1.0)}
    assert report.gpu_relative == dict.fromkeys(range(4), 1.0)
    assert report.stragglers == ()


def test_a_section_missing_on_one_rank_leaves_the_others_their_scores():
    """And the rank that never reported is still listed among the ranks."""
    report = maker(4).make(Medians({"fwd": {0: 1.0, 1: 2.0}, "eval": {0: 5.0}}))
    assert report.section_relative == {"fwd": {0: 1.0, 1: 0.5}, "eval": {0: 1.0}}
    assert report.ranks == 4


def test_it_travels_as_json():
    """What is read back is what was written."""
    report = maker(3).make(
        Medians({"fwd": {0: 1.0, 1: 2.0}}, {2: kernels(a=1.0)}), (VERDICT,), first_step=8, last_step=95
    )
    assert report.stragglers
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(Report({}).to_json()) == Report({})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nodes": {"x": "n"}}', '{"nodes": {"1": 2}}', "{}"])
def test_what_is_no_report_is_none(text: str):
    """The file is written by another process, perhaps of another version."""
    assert Report.from_json(text) is None


@pytest.mark.parametrize(("score", "read"), [("1", 1.0), ("0.5", 0.5), ("true", None), ('"1"', None), ("null", None)])
def test_a_score_is_a_number(score: str, read: float | None):
    """A whole one too; anything else makes the report unreadable."""
    found = Report.from_json(f'{{"nodes": {{"0": "n"}}, "gpu_relative": {{"0": {score}}}}}')
    assert (None if found is None else found.gpu_relative[0]) == read


def test_the_summary_has_what_is_plotted():
    """Minimum, median and maximum of each score that there is."""
    summary = maker(3).make(Medians({"fwd": {0: 1.0, 1: 2.0, 2: 4.0}})).summary()
    assert summary == pytest.approx(
        {
            "overall_relative_perf/min": 0.25,
            "overall_relative_perf/median": 0.5,
            "overall_relative_perf/max": 1.0,
            "overall_individual_perf/min": 1.0,
            "overall_individual_perf/median": 1.0,
            "overall_individual_perf/max": 1.0,
            "section_relative_perf/fwd/min": 0.25,
            "section_relative_perf/fwd/median": 0.5,
            "section_relative_perf/fwd/max": 1.0,
            "section_individual_perf/fwd/min": 1.0,
            "section_individual_perf/fwd/median": 1.0,
            "section_individual_perf/fwd/max": 1.0,
        }
    )


def test_a_verdict_in_words():
    """Who, what, since when, by how much, how sure."""
    assert VERDICT.text() == (
        "rank 2 (node n1): section bwd is 10 % slower than the others since step 40 "
        "(10 ms a step, 5 % of it, the others wait for it); persistent, confidence 0.80"
    )


def test_a_verdict_that_is_over_is_told_in_the_past():
    """From when to when, however much slower it was."""
    over = attrs.evolve(VERDICT, until_step=87)
    assert "section bwd was 10 % slower than the others from step 40 to 87 (" in over.text()
    assert "section bwd took 3.0 times as long as the others from step" in attrs.evolve(over, ratio=3.0).text()
