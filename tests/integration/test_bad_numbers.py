"""NaN in the loss of one rank, in a real training of two."""

import json
import sys

import pytest
from harness import job
from launcher_runs import launch
from two_launchers import two_launchers

from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.report.read import read_run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
TWO = ("--nproc-per-node", "2")


@pytest.mark.slow
def test_a_rollback_goes_back_before_the_bad_step_and_leaves_its_batch_out(tmp_path):
    """Rank 1 is named though its peer sees bad gradients at once; what was saved since is passed over; it finishes."""
    run = launch(tmp_path, *TWO, "bad_numbers.py", env={"BAD": "12,20", "POLICY": "rollback"})
    assert run.finish(timeout=120) == 0, run.err
    first, second = run.incidents()
    for incident, step in ((first, 12), (second, 20)):
        assert (incident["kind"], incident["cause"], incident["action"]) == ("numerics", "nan_loss", "rollback")
        assert [(culprit["rank"], culprit["step"]) for culprit in incident["culprits"]] == [(1, step)]
        assert incident["recovered_at"] is not None
    for rank in (0, 1):
        trained, is_finite = json.loads((tmp_path / f"end-{rank}").read_text())
        assert is_finite
        assert trained == list(range(21, 40))
    assert "skipped checkpoint step-00000013: it was saved after step 12" in run.err
    assert "the batch of step 12 is left out" in run.err
    assert_report_has(run.run_dir)


def assert_report_has(run_dir):
    """The page of it has three attempts, steps and a loss over time, and where the loss was none; nothing is unread."""
    facts = read_run(RunDirectory.open(run_dir))
    assert (facts.problems, len(facts.attempts), facts.headline.state) == ((), 3, "finished")
    assert [pin.kind for pin in facts.pins] == ["numerics", "numerics"]
    (mean, _), (loss, _) = facts.step_time, facts.loss
    assert mean.steps  # of an attempt whose steps are over before its monitor has looked twice there is none
    assert loss.steps[-1] == 39
    assert [step for _, step, text in loss.not_finite if text == "nan"] == [12, 20]


@pytest.mark.slow
def test_who_asks_for_an_exception_gets_one_and_the_same_one_twice_is_the_end(tmp_path):
    """With `raise` the batch is read again, from weights that are good: 77 after the second time."""
    run = launch(tmp_path, *TWO, "bad_numbers.py", env={"BAD": "12", "POLICY": "raise"})
    assert run.finish(timeout=120) == 77, run.err
    assert [incident["evidence"][0]["text"] for incident in run.incidents()] == ["loss is nan at step 12 on rank 1"] * 2
    assert "not to be retried" in run.err


def assert_rolled_back(incidents, folder):
    """Rank 1 is named; both ranks trained on behind the bad step, with sound weights, and ended."""
    (incident,) = incidents
    assert (incident["kind"], incident["cause"], incident["action"]) == ("numerics", "nan_loss", "rollback")
    assert [(culprit["rank"], culprit["step"]) for culprit in incident["culprits"]] == [(1, 12)]
    assert incident["recovered_at"] is not None
    for rank in (0, 1):
        assert json.loads((folder / f"end-{rank}").read_text()) == [list(range(13, 40)), True]


@pytest.mark.slow
def test_under_torchrun_its_restart_is_the_way_back(tmp_path):
    """Nobody of ours starts the ranks again: torchrun does, and they go back before the bad step."""
    # A restart of plain torchrun reads the dead attempt's addresses from a store that outlives it.
    env = {"BAD": "12", "POLICY": "rollback", "PROBE_OUT": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with job(tmp_path, "bad_numbers.py", command=TORCHRUN, env=env) as run:
        assert run.finish() == 0, run.screen
        assert_rolled_back(run.incidents(), tmp_path)
        assert "the batch of step 12 is left out" in run.screen


@pytest.mark.slow
def test_two_nodes_go_back_together(tmp_path):
    """The node of the sound rank has no say of its own: one incident, one way back, both launchers end with 0."""
    bad = {"BAD": "12", "POLICY": "rollback", "PROBE_OUT": str(tmp_path)}
    with two_launchers(tmp_path, "bad_numbers.py", **bad) as nodes:
        assert [node.finish() for node in nodes] == [0, 0], "\n".join(node.screen for node in nodes)
        assert_rolled_back(nodes[0].incidents(), tmp_path)
