"""A rank is killed, restarted and resumed: what is done twice is compared, and a difference is named, nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import job

pytestmark = pytest.mark.slow

NOT_EXACT = "resume_not_exact"
FOUND = {
    "good": ("exact", None, "resume exact: 3 of 3 repeated steps equal"),
    "order": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "batch": (NOT_EXACT, "samples", "step 6: other samples, the order of epoch 0"),
    "shard": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "rate": (NOT_EXACT, "learning rate", "step 6: learning rate 0.09 instead of 0.0531441"),
    "seeded": (NOT_EXACT, "generators", "step 6: random number generators in another state"),
    "python": (NOT_EXACT, "generators", "step 6: random number generators in another state"),
    "more draws": (NOT_EXACT, "generators", "step 6: random number generators in another state"),
    "forgets": (NOT_EXACT, "the state of mean", "the state of mean is not as it was saved"),
    "weights": (NOT_EXACT, "the state of model", "the state of model is not as it was saved"),
    "own rate": ("exact", None, "resume exact: 3 of 3 repeated steps equal"),
    "augmented": ("exact", None, "resume exact: 3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "stream": ("exact", None, None),
    "batch size": ("exact", None, None),
}
DAILY = ("good", "order")


@pytest.mark.parametrize(
    "kind", [one if one in DAILY else pytest.param(one, marks=pytest.mark.release) for one in FOUND]
)
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, kind):
    """Killed in step 7, resumed behind step 5; the job finishes all the same, with one incident: the kill."""
    result, component, line = FOUND[kind]
    env = {"RESILIENCE_FAULT": "kill:rank=0,step=7"}
    with job(tmp_path, "--max-restarts", "1", "repeated.py", kind, env=env) as run:
        assert run.finish(60.0) == 0, run.screen
        assert line is None or line in run.screen, run.screen
        assert (NOT_EXACT in run.screen) is (result == NOT_EXACT)
        assert [incident["kind"] for incident in run.incidents()] == ["crash"]
        for command, key in (("status", "resume"), ("outcome", "resume_check"), ("report", "resume")):
            program = [sys.executable, "-m", "resilience_sdk", command, "--json", str(run.run_dir)]
            told = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)[key]
            assert (told["result"], told["component"], told["step"]) == (result, component, 5)
            if kind != "good":
                break  # they read the same
        results = {check["what"]: check["result"] for check in told["checks"]}
        if line is None:
            assert results == {"state": "exact", "order": "not_compared", "steps": "not_compared"}
        assert (run.run_dir / "witness" / "rank-00000.json").exists()
