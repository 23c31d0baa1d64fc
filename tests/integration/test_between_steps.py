"""What frameworks do between two steps: it may take any time, and a save that never ends is found."""

from __future__ import annotations

import json

import pytest
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow

PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning torchdata"),
    "transformers": ("transformers", "transformers accelerate"),
    "accelerate": ("accelerate", "accelerate"),
}


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_what_comes_behind_an_incomplete_step_is_no_hang(tmp_path, framework):
    """It takes three times as long as a step may."""
    require(*PACKAGES[framework])
    env = {"SECONDS": "3", "RESILIENCE_HEARTBEAT_TIMEOUT": "1"}
    with job(tmp_path, "between_steps.py", framework, "left-over", env=env) as run:
        assert run.finish(90.0) == 0, run.screen
        assert run.incidents() == []
        assert [json.loads(path.read_text()) for path in run.told("steps-0-0")] == [{"steps": 2}]


@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate"])
def test_a_last_save_that_hangs_is_found(tmp_path, framework):
    """As one in the middle is: by the deadline of a save."""
    require(*PACKAGES[framework])
    env = {"RESILIENCE_SECTION_TIMEOUTS": "checkpoint:1", "RESILIENCE_FAULT": "preempt:rank=0,step=5"}
    with job(tmp_path, "between_steps.py", framework, "last-save", env=env) as run:
        assert run.finish(90.0) == 0, run.screen
        [hang] = [incident for incident in run.incidents() if incident["kind"] == "hang"]
        assert [(culprit["rank"], culprit["section"]) for culprit in hang["culprits"]] == [(0, "checkpoint")]
