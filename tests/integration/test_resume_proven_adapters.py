"""As `test_resume_proven.py`, for the loops of frameworks: the steps are theirs, and so are the cures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness import job

pytestmark = pytest.mark.slow

NOT_EXACT = "resume_not_exact"
GOOD = ("exact", None, "resume exact: 3 of 3 repeated steps equal")
GENERATORS = (NOT_EXACT, "generators", "random number generators in another state")
NOT_REPEATABLE = "batches that come from a stream, or in any order, are not repeatable"
OTHER_BATCHES = "a step has other batches, or the loader other data, than before"
# What is found: the result of all, the component, and a part of a line on the screen or in the journal.
ACCELERATE = {
    "good": GOOD,
    "accumulated": GOOD,
    "order": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "batch": (NOT_EXACT, "samples", "step 6: other samples, the order of epoch 0; let samplers draw"),
    "shard": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "rate": (NOT_EXACT, "learning rate", "instead of 0.0531441; give the scheduler to accelerator.prepare()"),
    "seeded": GENERATORS,
    "python": GENERATORS,
    "more draws": GENERATORS,
    "forgets": (NOT_EXACT, "the state of custom_object 0", "the state of custom_object 0 is not as it was saved"),
    "weights": (NOT_EXACT, "the state of model 0", "the state of model 0 is not as it was saved"),
    "own rate": GOOD,
    "augmented": ("exact", None, "3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "stream": ("exact", None, NOT_REPEATABLE),
    "any order": ("exact", None, NOT_REPEATABLE),
    "batch size": ("exact", None, OTHER_BATCHES),
    "accumulation": ("exact", None, OTHER_BATCHES),
}
_ATTACH_CURE = "let samplers draw from torch's generators or from set_epoch(epoch), and the loader go on where it was"
ATTACH = {
    "good": GOOD,
    "accumulated": GOOD,
    "order": (NOT_EXACT, "samples", f"step 5: other samples; {_ATTACH_CURE}"),
    "batch": (NOT_EXACT, "samples", f"step 6: other samples; {_ATTACH_CURE}"),
    "shard": (NOT_EXACT, "samples", f"step 5: other samples; {_ATTACH_CURE}"),
    "no state": (NOT_EXACT, "samples", f"step 5: other samples; {_ATTACH_CURE}"),
    "skipping": GOOD,
    "rate": (NOT_EXACT, "learning rate", "instead of 0.0531441; give the scheduler to the state of the Checkpointer"),
    "seeded": GENERATORS,
    "python": GENERATORS,
    "more draws": GENERATORS,
    "forgets": (NOT_EXACT, "the state of mean", "the state of mean is not as it was saved"),
    "weights": (NOT_EXACT, "the state of model", "the state of model is not as it was saved"),
    "own rate": GOOD,
    "augmented": ("exact", None, "3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "stream": ("exact", None, NOT_REPEATABLE),
    "any order": ("exact", None, NOT_REPEATABLE),
    "batch size": ("exact", None, OTHER_BATCHES),
    "accumulation": ("exact", None, "step 5 has 2 batches of the loader now, 1 before"),
}
LIGHTNING = {
    "good": GOOD,
    "accumulated": GOOD,
    "stateful": GOOD,
    "order": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "batch": (NOT_EXACT, "samples", "step 6: other samples, the order of epoch 0; let samplers draw"),
    "shard": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "rate": (NOT_EXACT, "learning rate", "instead of 0.0531441; return the scheduler from configure_optimizers()"),
    "seeded": GENERATORS,
    "python": GENERATORS,
    "more draws": GENERATORS,
    "weights": (NOT_EXACT, "the state of model", "the state of model is not as it was saved"),
    "own rate": GOOD,
    "augmented": ("exact", None, "3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "stream": ("exact", None, NOT_REPEATABLE),
    "any order": ("exact", None, NOT_REPEATABLE),
    "batch size": ("exact", None, OTHER_BATCHES),
    "accumulation": ("exact", None, OTHER_BATCHES),
}
TRANSFORMERS = {
    "good": GOOD,
    "accumulated": GOOD,
    "order": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "batch": (NOT_EXACT, "samples", "step 6: other samples, the order of epoch 0; let samplers draw"),
    "shard": (NOT_EXACT, "the order of epoch 0", "other samples, the order of epoch 0: read again, it differs from"),
    "rate": (NOT_EXACT, "learning rate", "instead of 0.0531441; give the scheduler to Trainer(optimizers=...)"),
    "seeded": GENERATORS,
    "python": GENERATORS,
    "more draws": GENERATORS,
    "weights": (NOT_EXACT, "the state of model", "the state of model is not as it was saved"),
    "own rate": GOOD,
    "augmented": ("exact", None, "3 of 3 repeated steps equal; 3 with other values of the same samples"),
    "stream": ("exact", None, NOT_REPEATABLE),
    "any order": ("exact", None, NOT_REPEATABLE),
    "batch size": ("exact", None, OTHER_BATCHES),
    "accumulation": ("exact", None, OTHER_BATCHES),
}
FOUND = {"accelerate": ACCELERATE, "attach": ATTACH, "lightning": LIGHTNING, "transformers": TRANSFORMERS}
CASES = [(framework, kind) for framework, kinds in FOUND.items() for kind in kinds]
DAILY = {
    ("accelerate", "good"),
    ("accelerate", "batch"),
    ("attach", "good"),
    ("lightning", "good"),
    ("transformers", "good"),
}


@pytest.mark.parametrize(
    ("framework", "kind"),
    [case if case in DAILY else pytest.param(*case, marks=pytest.mark.release) for case in CASES],
    ids="-".join,
)
def test_a_resume_is_proven_or_what_differs_is_named(tmp_path, framework, kind):
    """Killed in step 8, resumed behind step 5; the job finishes all the same."""
    result, component, line = FOUND[framework][kind]
    env = {"RESILIENCE_FAULT": "kill:rank=0,step=8"}
    with job(tmp_path, "--max-restarts", "1", f"repeated_{framework}.py", kind, env=env) as run:
        assert run.finish(120.0) == 0, run.screen
        assert (NOT_EXACT in run.screen) is (result == NOT_EXACT), run.screen
        program = [sys.executable, "-m", "resilience_sdk", "status", "--json", str(run.run_dir)]
        told = json.loads(subprocess.run(program, capture_output=True, text=True, check=True, env=os.environ).stdout)
        told = told["resume"]
        checks = "\n".join(f"{check['text']}; {check['cure']}" for check in told["checks"])
        assert (told["result"], told["component"], told["step"]) == (result, component, 5), checks
        assert line in run.screen or line in checks, (run.screen, checks)
        assert [incident["kind"] for incident in run.incidents()] == ["crash"]
        if result == NOT_EXACT or line.startswith("resume exact"):
            assert line in run.screen, run.screen
