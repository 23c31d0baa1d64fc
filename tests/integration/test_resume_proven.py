"""A rank is killed, restarted and resumed: what is done twice is compared, and a difference is named, nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import job

pytestmark = pytest.mark.slow

FOUND = {
    "good": ("exact", None, "resume exact: 3 of 3 repeated steps equal"),
    "order": (
        "resume_not_exact",
        "the order of epoch 0",
        "resume_not_exact: other samples, the order of epoch 0: read",
    ),
    "rate": ("resume_not_exact", "learning rate", "resume_not_exact: step 6: learning rate 0.09 instead of 0.0531441"),
    "seeded": ("resume_not_exact", "generators", "resume_not_exact: step 6: random number generators in another state"),
    "forgets": ("resume_not_exact", "the state of mean", "resume_not_exact: the state of mean is not as it was saved"),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, kind):
    """Killed in step 7, resumed behind step 5; the job finishes all the same, with one incident: the kill."""
    result, component, line = FOUND[kind]
    env = {"RESILIENCE_FAULT": "kill:rank=0,step=7"}
    with job(tmp_path, "--max-restarts", "1", "repeated.py", kind, env=env) as run:
        assert run.finish(60.0) == 0, run.screen
        assert line in run.screen
        assert [incident["kind"] for incident in run.incidents()] == ["crash"]
        for command, key in (("status", "resume"), ("outcome", "resume_check"), ("report", "resume")):
            program = [sys.executable, "-m", "resilience_sdk", command, "--json", str(run.run_dir)]
            told = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)[key]
            assert (told["result"], told["component"], told["step"]) == (result, component, 5)
            if kind != "good":
                break  # they read the same
        assert bool(run.events("resume_not_exact")) is (kind != "good")
        assert (run.run_dir / "witness" / "rank-00000.json").exists()
