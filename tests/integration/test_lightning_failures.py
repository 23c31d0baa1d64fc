"""What fails on one rank of a Lightning training leaves no other one waiting; and the example does as it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require
from harness import PROJECT, job
from to_the_end import output_of

pytestmark = pytest.mark.slow
EXAMPLE = PROJECT / "examples" / "lightning_fit.py"


@pytest.fixture(autouse=True)
def frameworks():
    """What all of these need."""
    require("lightning.pytorch", "lightning")
    require("torchdata")


def test_a_full_disk_and_an_exception_on_one_rank(tmp_path):
    """The save is reported and survived; the exception ends the attempt, and the next one resumes."""
    with job(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", "lightning_failing.py") as run:
        assert run.finish() == 0, run.screen
        assert "checkpoint at step 5 failed: rank 0: No space left on device" in run.screen
        assert "step-00000010: step 10 is next" in run.screen
        assert [json.loads(path.read_text())["step"] for path in run.told("end-*")] == [20, 20]
        [crash] = run.incidents()
        assert (crash["kind"], [each["rank"] for each in crash["culprits"]]) == ("crash", [1])


@pytest.mark.parametrize(
    ("command", "fault", "lines"),
    [
        (
            ("-m", "resilience_sdk", "run", "--nproc-per-node=2", "--run-dir=run"),
            "kill:rank=1,step=60",
            ("step-00000050: step 50 is next", "finished after step 80"),
        ),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            "",
            ("finished after step 80",),
            marks=pytest.mark.release,
        ),
        pytest.param((), "", ("finished after step 80",), marks=pytest.mark.release),
    ],
    ids=["our launcher", "torchrun", "python"],
)
def test_the_example(tmp_path, command, fault, lines):
    """Under each launcher; under ours it goes on after a rank was killed."""
    output = output_of(tmp_path, *command, EXAMPLE, "--steps", 80, RESILIENCE_FAULT=fault)
    for line in lines:
        assert line in output
