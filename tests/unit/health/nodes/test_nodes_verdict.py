"""What is said of nodes that are compared and tried, and what follows for the job."""

import attrs
import pytest

from resilience_sdk.health import Finding
from resilience_sdk.health.nodes.pairing import Trial
from resilience_sdk.health.nodes.verdict import Refusal, Report, from_reports, from_trials, together

NAMES = ("a", "b", "c", "d")
GOOD_S = 0.02


def version(torch):
    """Return what a node with this torch reports."""
    found = Finding(probe="software", check="torch", status="ok", data={"same": {"torch": torch}})
    return Report(findings=(found,))


def trials(*told, rates=None):
    """Return trials of (round, first, second, seconds)."""
    rates = rates or {}
    return [
        Trial(round_, (one, two), seconds, "" if seconds else "refused", {n: rates.get(n, 10.0) for n in (one, two)})
        for round_, one, two, seconds in told
    ]


def test_the_odd_version_is_left_out_and_without_a_majority_all_stop():
    """Its node is named with both versions."""
    verdict = from_reports(NAMES, dict(enumerate(map(version, ("2.8", "2.8", "2.7", "2.8")))))
    assert list(verdict.leave_out) == [2]
    assert "2.7 on c" in verdict.leave_out[2]
    assert not verdict.stop
    verdict = from_reports(NAMES, dict(enumerate(map(version, ("2.8", "2.8", "2.7", "2.7")))))
    assert not verdict.leave_out
    assert verdict.stop.startswith("no more than half of the nodes have the same torch (2.8 on a, b; 2.7 on c, d); ")
    assert "install the same version everywhere" in verdict.stop


def test_the_version_of_a_node_that_leaves_does_not_count():
    """The others have the same."""
    one, two, three = map(version, ("2.8", "2.8", "2.7"))
    bad = attrs.evolve(three, refusal=Refusal("GPU 3 is lost", True))
    verdict = from_reports(NAMES[:3], {0: one, 1: two, 2: bad})
    assert (verdict.leave_out, verdict.stop, verdict.findings) == ({2: "GPU 3 is lost"}, "", [])
    verdict = from_reports(NAMES[:2], {0: one, 1: bad})
    assert (verdict.leave_out, verdict.stop) == ({1: "GPU 3 is lost"}, "")


def test_who_brings_no_report_or_refuses_is_left_out():
    """Also for what may be the same everywhere, where it is not."""
    reports = {0: Report(), 1: Report(refusal=Refusal("bad GPU", True)), 3: Report(refusal=Refusal("no room", False))}
    verdict = from_reports(NAMES, reports)
    assert verdict.leave_out == {2: "it says nothing", 1: "bad GPU", 3: "no room"}
    assert not verdict.stop
    assert [(finding.check, finding.subject) for finding in verdict.findings] == [("answers", "c")]


def test_what_most_nodes_refuse_is_for_somebody_to_cure():
    """And those with a fault of their own leave."""
    full = Report(refusal=Refusal("no room", False))
    verdict = from_reports(NAMES, {0: full, 1: Report(refusal=Refusal("bad GPU", True)), 2: full, 3: full})
    assert (verdict.leave_out, verdict.stop) == ({1: "bad GPU"}, "a: no room; c: no room; d: no room")


@pytest.mark.parametrize(
    ("seconds", "check", "words"),
    [
        (None, "all_reduce", "no all_reduce with c and d came about, others reduce with one another: refused"),
        (0.5, "all_reduce_speed", "an all_reduce takes 500 ms with c and d, 20 ms among others"),
    ],
)
def test_a_node_whose_reductions_go_wrong(seconds, check, words):
    """It failed with two, who go well with others."""
    held = trials((0, 0, 3, seconds), (0, 1, 2, GOOD_S), (1, 0, 2, seconds), (1, 1, 3, GOOD_S))
    verdict = from_trials(NAMES, range(4), (), held)
    (finding,) = verdict.findings
    assert (finding.check, finding.subject, finding.stops) == (check, "a", True)
    assert finding.evidence.replace("d and c", "c and d") == words
    assert verdict.leave_out == {0: finding.evidence}
    assert not verdict.unnamed + verdict.stop


def test_a_node_that_computes_slowly():
    """With the rates of both."""
    held = trials((0, 0, 1, GOOD_S), (0, 2, 3, GOOD_S), (1, 1, 2, GOOD_S), rates={1: 3.0})
    (finding,) = from_trials(NAMES, range(4), (), held).findings
    assert (finding.check, finding.subject, finding.value, finding.threshold) == ("compute_speed", "b", 3.0, 5.0)
    assert finding.evidence == "computes 3 products a second, others 10"


def test_where_nobody_can_be_named():
    """Of two: one of these. Of more, where every pair fails: what has to be cured. Between two sound ones: the way."""
    two = from_trials(NAMES, range(2), (), trials((0, 0, 1, None)))
    assert "one of these two is the reason" in two.unnamed
    assert not two.stop
    three = from_trials(NAMES, range(3), (), trials((0, 0, 1, None), (1, 0, 2, None), (2, 1, 2, None)))
    assert three.stop == "no all_reduce between any of these: refused (a, b and c)"
    assert not three.unnamed
    way = from_trials(
        NAMES, range(4), (), trials((0, 0, 1, None), (0, 2, 3, GOOD_S), (1, 0, 2, GOOD_S), (1, 1, 3, GOOD_S))
    )
    assert way.unnamed == "a and b: no all_reduce with one another came about, each reduces with others: refused"
    for verdict in (two, three, way):
        assert not verdict.leave_out
        assert [finding.check for finding in verdict.findings] == ["all_reduce"]


def test_both_parts_are_told_together():
    """What reports say, and what trials say."""
    before = from_reports(NAMES, {0: Report(), 1: Report(), 2: Report()})
    after = from_trials(NAMES, range(2), (2,), trials((0, 0, 1, GOOD_S)))
    verdict = together(before, after)
    assert verdict.leave_out == {3: "it says nothing", 2: "it stopped to answer"}
    assert [finding.subject for finding in verdict.findings] == ["d", "c"]
    assert set(verdict.to_json()["leave_out"]) == {"2", "3"}
