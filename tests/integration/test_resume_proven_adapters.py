"""As `test_resume_proven.py`, for the loops of frameworks: the steps are theirs, and so are the cures."""

from __future__ import annotations

import planted
import pytest
from adapter_frameworks import require
from harness import job

from resilience_sdk.core.resume_proof import NOT_EXACT

pytestmark = pytest.mark.slow

_DAILY = {
    ("accelerate", "good"),
    ("accelerate", "batch"),
    ("deepspeed", "good"),
    ("lightning", "good"),
    ("megatron", "good"),
    ("transformers", "good"),
}
_WAYS = ("accelerate", "deepspeed", "lightning", "megatron", "transformers")
_CASES = [(way, kind) for way in _WAYS for kind in planted.WAYS[way]]


@pytest.mark.parametrize(
    ("way", "kind"),
    [case if case in _DAILY else pytest.param(*case, marks=pytest.mark.release) for case in _CASES],
)
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, way, kind):
    """Killed in step 8, resumed behind step 5; the job finishes all the same."""
    require(way)
    planted.check(planted.strike(tmp_path, way, kind), kind, planted.expected(way, kind))


@pytest.mark.release
def test_a_second_training_of_a_process_is_not_compared_with_the_first(tmp_path):
    """Which is complete at the resume, so that nobody leaves other witnesses before."""
    require("transformers")
    with job(tmp_path, "--max-restarts", "1", "second_training.py", framework="transformers", forked=True) as run:
        assert run.finish(240.0) == 0, run.screen
        assert NOT_EXACT not in run.screen
        words = "these steps were those of another training before: the program has several in one process"
        assert words in {event.get("text") for event in run.events("resume_check")}
