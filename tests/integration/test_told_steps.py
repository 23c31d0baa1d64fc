"""The step that is told is the one that the loop was in, and that of the plan of an injected fault, in every tier."""

import pytest
from harness import job

pytestmark = pytest.mark.slow  # jobs of four attempts each

FAULT = {"RESILIENCE_FAULT": "kill:rank=1,step=5"}
OPTIONS = ("--nproc-per-node", "2", "--max-restarts", "3", "--heartbeat-timeout", "2")


@pytest.mark.parametrize("way", ["optimizer", "numbered", "decorated"])
def test_the_step_told_is_the_loops(tmp_path, way):
    """Killed by a fault in step 5, raising in 6, stopped in 7, and then through: screen, report, journal."""
    with job(tmp_path, *OPTIONS, "told_steps.py", way, env=FAULT) as run:
        assert run.finish() == 0, run.screen
        assert "strikes rank 1 at step 5" in run.screen
        reports = [(found["kind"], found["attempt"], found["culprits"]) for found in run.incidents()]
        assert [(kind, attempt, [(c["rank"], c["step"]) for c in who]) for kind, attempt, who in reports] == [
            ("crash", 0, [(1, 5)]),
            ("crash", 1, [(1, 6)]),
            ("hang", 2, [(1, 7)]),
        ]
        for found, step in zip(run.incidents(), (5, 6, 7), strict=True):
            assert f"step {step}" in run.incident_file(found, "report.md")
        assert "is stopped at step 7" in run.screen
        exits = run.events("rank_exit", rank=1)
        assert [event["step"] for event in exits] == [5, 6, 7, 9]
        assert {event["step"] for event in run.events("first_beat")} == {0}
        lost = [found["lost_steps"] for found in run.incidents()]
        assert lost[0] == lost[2] - 2 == 5 if way == "numbered" else lost == [None] * 3
