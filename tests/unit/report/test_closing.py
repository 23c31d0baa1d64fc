"""The lines that a run ends with: how long, where the time went, what is worth a look."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.report.closing import summary_lines
from resilience_sdk.report.facts import (
    CheckpointFacts,
    CurveFacts,
    FindingFacts,
    Headline,
    IncidentFacts,
    RunFacts,
    StragglerFacts,
)

NOTHING = "worth a look: nothing stood out"
CURVE = CurveFacts("mean", "s", (1.0,), (1,), (0.1,))


def facts(state: str = "finished", *, goodput: dict[str, Any] | None = None, **parts: Any) -> RunFacts:
    """Return the facts of a run of 100 s, 80 of them productive and 15 of start-up."""
    seconds = dict.fromkeys((bucket.value for bucket in Bucket), 0.0)
    seconds |= {"productive": 80.0, "startup": 15.0, "data": 4.5, "checkpoint": 0.5}
    told = {"wall_s": 100.0, "goodput": 0.8, "lost_steps": 0, "buckets": seconds, **(goodput or {})}
    known: dict[str, Any] = {"step_time": (CURVE,), "goodput": told, **parts}
    return RunFacts("/r", "r", 9.0, "0", Headline(state, "It ended."), **known)


def incident(headline: str) -> IncidentFacts:
    """Return an incident of which a headline is known alone."""
    empty = {field.name: None for field in attrs.fields(IncidentFacts)}
    lists = {"culprits": (), "stacks": (), "evidence": (), "victims": "", "paragraph": ""}
    return IncidentFacts(**{**empty, **lists, "id": "1", "kind": "crash", "headline": headline})  # type: ignore[arg-type]


def test_a_run_in_which_all_was_well_says_so() -> None:
    """Buckets of less than a hundredth of its time are left out."""
    assert summary_lines(facts()) == ["time: 1.7 min, goodput 80% (startup 15%, data 4%)", NOTHING]


def test_a_run_in_which_nothing_ran_has_no_lines() -> None:
    """There is no time to account for."""
    assert summary_lines(RunFacts("/r", "r", 9.0, "0", Headline("empty", "Nothing has run."))) == []


def test_bounds_lost_steps_and_attempts_are_said() -> None:
    """Where nobody knows what was done again, goodput is a bound."""
    lost = facts(goodput={"lost_steps": 7}, hidden_attempts=3)
    assert summary_lines(lost)[0] == "time: 1.7 min in 3 attempts, goodput 80% (startup 15%, data 4%), 7 lost steps"
    unknown = facts(goodput={"lost_steps": None, "at_most": True, "buckets": {"productive": 100.0, "replayed": None}})
    assert summary_lines(unknown)[0] == "time: 1.7 min, goodput at most 80%"


def test_where_no_step_was_seen_it_says_how_steps_are_seen() -> None:
    """`nothing stood out` would be more than is known."""
    assert "no step was seen" in summary_lines(facts(step_time=()))[1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"why_slow": "70% of the step waits for data"}, "70% of the step waits for data"),
        ({"stood": "Rank 1 was stopped for 80 s."}, "Rank 1 was stopped for 80 s."),
        ({"incidents": (incident("rank 1 died"),)}, "1 incident on the way, the last one: rank 1 died"),
        (
            {"checkpoints": (CheckpointFacts(1.0, 40, "failed", None, None, None, "the disk is full"),)},
            "the checkpoint after 40 steps was not written: the disk is full",
        ),
        ({"findings": (FindingFacts(1.0, "n1", "gpu", "failure", "Xid 79", None),)}, "n1: gpu: Xid 79"),
        (
            {"stragglers": StragglerFacts(1.0, 2, 0.7, (), ((1.0, "found", "rank 1 is 30% slower"),))},
            "rank 1 is 30% slower",
        ),
    ],
)
def test_what_may_cost_something_is_named(parts: dict[str, Any], words: str) -> None:
    """One thing, in the words of the page."""
    assert summary_lines(facts(**parts))[1] == f"worth a look: {words}"


def test_what_is_over_is_not_worth_a_look() -> None:
    """A finding that no longer holds, a rank that is no longer slow."""
    over = facts(
        findings=(FindingFacts(1.0, "n1", "gpu", "failure", "Xid 79 (good again since)", None),),
        stragglers=StragglerFacts(1.0, 2, 0.7, (), ((1.0, "found", "slow"), (2.0, "over", "no longer slow"))),
    )
    assert summary_lines(over)[1] == NOTHING


def test_the_gravest_two_are_named_and_the_rest_is_counted() -> None:
    """A line stays a line."""
    many = facts(incidents=(incident("rank 1 died"),), why_slow="slow data", stood="It stood.")
    assert summary_lines(many)[1].endswith("rank 1 died; slow data; and 1 more")


def test_a_job_that_failed_does_not_praise_itself() -> None:
    """What it failed of is said by its other last lines; what else stands out is said beside them."""
    assert len(summary_lines(facts("ended", incidents=(incident("rank 1 died"),)))) == 1
    assert summary_lines(facts("ended", why_slow="slow data"))[1] == "worth a look: slow data"
