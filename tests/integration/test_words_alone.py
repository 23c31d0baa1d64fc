"""A line that a program prints, or raises, takes no node out of a job: it starts a look, and that decides."""

import pytest
from harness import job
from stub_driver import StubDriver

pytestmark = pytest.mark.slow


def ended_by(folder, how, **env):
    """Run a job that ends so, with one restart; return it ended, and its exit code."""
    with job(folder, "--nproc-per-node", "2", "--max-restarts", "1", "blaming.py", how, env=env) as run:
        return run, run.finish()


@pytest.mark.parametrize(("how", "category"), [("prints", "hardware"), ("raises", "user")])
def test_words_of_a_program_are_tried_again_on_the_same_node(tmp_path, how, category):
    """No GPU is here, and none is found to be broken: the words stay a guess, or the program's own; never 76."""
    run, code = ended_by(tmp_path, how)
    assert code in (1, 77), run.screen
    first = run.incidents()[0]
    assert (first["category"], first["action"]) == (category, "restart")
    assert first["confidence"] <= 0.5 or how == "raises"
    assert [one["text"] for one in first["evidence"] if one["source"] == "look"], first["evidence"]
    assert len(run.events("attempt_start")) == 2
    assert run.events("decision")[-1]["verdict"] != "hardware"


def test_a_look_that_finds_the_fault_takes_the_node_out(tmp_path, stub_library):
    """The driver has counted what the program says."""
    state = tmp_path / "state"
    driver = StubDriver(stub_library, state).changed({"gpus": 2, "1.ecc_uncorrected": 2, "1.field.230": 4})
    run, code = ended_by(tmp_path, "raises", **driver.environment)
    assert code == 76, run.screen
    (incident,) = run.incidents()
    assert (incident["category"], incident["action"]) == ("hardware", "exclude_node")
    assert "GPU 1" in incident["evidence"][0]["text"]
