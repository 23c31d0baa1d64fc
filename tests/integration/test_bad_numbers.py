"""NaN in the loss of one rank, in a real training of two."""

import json

import pytest
from launcher_runs import launch

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


@pytest.mark.slow
def test_who_asks_for_an_exception_gets_one_and_the_same_one_twice_is_the_end(tmp_path):
    """With `raise` the batch is read again, from weights that are good: 77 after the second time."""
    run = launch(tmp_path, *TWO, "bad_numbers.py", env={"BAD": "12", "POLICY": "raise"})
    assert run.finish(timeout=120) == 77, run.err
    assert [incident["evidence"][0]["text"] for incident in run.incidents()] == ["loss is nan at step 12 on rank 1"] * 2
    assert "not to be retried" in run.err
