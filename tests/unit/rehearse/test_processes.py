"""As how many processes a script is rehearsed: a copy is no rank."""

from __future__ import annotations

from typing import Any

import pytest

from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rehearse.plan import JobFacts
from resilience_sdk.rehearse.processes import ONE, OWN, RANKS, UNKNOWN, decide, why_none_is_struck


def left(*ranks: dict[str, Any], code: int | None = 0) -> JobFacts:
    """Return what an undisturbed run of these ranks has left."""
    traces = tuple(RehearsedRank(0, number, **facts) for number, facts in enumerate(ranks))
    return JobFacts((code,), 1.0, (traces,), (), ())


STEPS = ((0, 1.0),)


@pytest.mark.parametrize(
    ("facts", "kind", "ranks", "words"),
    [
        (left({"group": 2, "steps": STEPS}, {"group": 2, "steps": STEPS}), RANKS, 2, None),
        (left({"group": 2, "steps": STEPS}, {}), RANKS, 2, None),
        (left({"alone": True}, {}, code=None), ONE, 1, "the script is one process: none of 2"),
        (left({"started": "torch.multiprocessing.spawn"}, {}, code=None), OWN, 1, "starts its processes by itself"),
        # A helper of a script that trains by itself, before its first step.
        (left({"started": "log", "alone": True, "steps": STEPS}, {}), ONE, 1, "the script is one process"),
        (left({}, {}, code=1), ONE, 1, "once more as one"),
        (left({}, {}), UNKNOWN, 2, None),
    ],
)
def test_it_is_seen_in_the_undisturbed_run(facts: JobFacts, kind: str, ranks: int, words: str | None) -> None:
    """And what is not as many as were asked for is said."""
    found = decide(facts, 2)
    assert (found.kind, found.ranks) == (kind, ranks)
    assert (found.words is None) == (words is None)
    assert words is None or words in (found.words or "")
    assert found.is_trial == (facts.exit_codes == (1,))


def test_one_that_was_asked_for_is_nothing_to_say() -> None:
    """Only that there are no others."""
    found = decide(left({"alone": True, "steps": STEPS}), 1)
    assert (found.kind, found.ranks, found.words) == (ONE, 1, None)
    assert decide(left({}, code=1), 1).kind == UNKNOWN


def test_processes_of_the_scripts_own_are_struck_by_nothing() -> None:
    """It is said how they become ranks."""
    own = decide(left({"started": "main"}), 1)
    assert "resilience run --nproc-per-node N" in (why_none_is_struck(own) or "")
    assert why_none_is_struck(decide(left({"alone": True}), 1)) is None
