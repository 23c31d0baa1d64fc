"""NVIDIA's callback of sections: what is timed, what is logged, and what its policy for exceptions comes to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
LOGGED = "[FaultToleranceCallback@rank0] "


@pytest.fixture(autouse=True)
def frameworks():
    """What all of these need."""
    require("lightning.pytorch", "lightning")
    require("torchdata")


def told(folder, name):
    return json.loads((folder / "told" / name).read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_exactly_three_sections_over_two_fits(tmp_path, ranks):
    """Setup once a fit, a step a batch, also of an evaluation; the trainer is left as it was, one device works as two.

    The timeouts that were learned are logged in the original's words, and loaded by the next job.
    """
    flag = tmp_path / "flag"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}
    with job(tmp_path, "--nproc-per-node", str(ranks), "lightning_sections.py", "twice", env=env) as run:
        assert run.finish() == 0, run.screen
        screen = run.screen
    for rank in range(ranks):
        fits = [told(tmp_path, f"fit-{number}-{rank}") for number in (1, 2)]
        assert [fit["step"] for fit in fits] == [12, 24]
        assert [fit["patched"] for fit in fits] == [[], []]
        sections = told(tmp_path, f"end-{rank}")["sections"]
        assert set(sections) == {"setup", "step", "checkpointing"}
        assert sections["setup"] == 2
        batches = 12 + 24
        evaluations = 2 * (3 + 6) + 2  # two batches each, and a sanity check of one before each fit
        assert sections["step"] == batches + evaluations
        assert sections["checkpointing"] >= 3 + 6
    assert flag.exists()
    assert screen.count(f"{LOGGED}Fault tolerance dir: {tmp_path / 'run'}") == 2
    assert f"{LOGGED}Fault tolerance client initialized. Timeouts: not calculated yet." in screen
    (tmp_path / "run" / "finished").unlink()
    with job(tmp_path, "--nproc-per-node", str(ranks), "lightning_sections.py", "twice", env=env) as run:
        assert run.finish() == 0, run.screen
        loaded = f"{LOGGED}Fault tolerance timeouts loaded: SectionTimeouts(section={{'setup': "
        [line, *_] = [line for line in run.screen.splitlines() if line.startswith(loaded)]
        assert "calculated_sections=['setup', 'step', 'checkpointing']" in line


@pytest.mark.parametrize(
    ("action", "code", "attempts", "verdict", "said"),
    [
        ("Continue", 77, 2, "stop", "the same error ended two attempts in a row"),
        ("ShutdownWorkload", 77, 1, "stop", "a rank asked for the end of the job: policy saw ValueError: bad memory"),
        (
            "ExcludeThisNode",
            76,
            1,
            "hardware",
            "a rank asked to leave this node out: policy saw ValueError: bad memory",
        ),
    ],
)
def test_the_policy_for_exceptions_is_obeyed(tmp_path, action, code, attempts, verdict, said):
    """By the launcher, in the place of a restart; the flag that ends a loop around the job is set by a shutdown alone.

    The other rank, which has lost its peer, asks for something too: what counts is the word of the one that failed.
    """
    flag = tmp_path / "flag"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    with job(tmp_path, *options, "lightning_sections.py", action, env=env) as run:
        assert run.finish() == code, run.screen
        assert len(run.events("attempt_start")) == attempts
        decision = run.events("decision")[-1]
        assert (decision["verdict"], decision["exit_code"]) == (verdict, code)
        assert said in decision["reason"]
        assert [each["rank"] for each in run.incidents()[0]["culprits"]] == [1]
        assert not (run.run_dir / "finished").exists()
    assert flag.exists() == (action == "ShutdownWorkload")


def test_a_section_has_the_deadline_of_nvidias_configuration(tmp_path):
    """A rank that hangs in a step is named with this section when its time is over, and all start again."""
    config = tmp_path / "ft.yaml"
    config.write_text(
        "fault_tolerance:\n  rank_section_timeouts: {setup: 600, step: 3, checkpointing: 420}\n"
        "  rank_out_of_section_timeout: 300\n"
    )
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--fault-tol-cfg-path", str(config))
    env = {"RESILIENCE_FAULT": "hang:rank=1,step=6,section=step"}
    with job(tmp_path, *options, "lightning_sections.py", "twice", env=env) as run:
        assert run.finish() == 0, run.screen
        [incident] = run.incidents()
        [culprit] = incident["culprits"]
        assert (incident["kind"], culprit["rank"], culprit["section"]) == ("hang", 1, "step")
        assert len(run.events("attempt_start")) == 2
        assert "section_timeouts has" not in run.screen
