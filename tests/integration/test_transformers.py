"""A Trainer that is killed in a save, finds no room for one, or is asked to leave, ends with the very same weights."""

from __future__ import annotations

import json
import sys

import pytest
from adapter_frameworks import require
from harness import PROJECT, job, steps_lost
from to_the_end import Ended, ended

pytestmark = pytest.mark.slow

EXAMPLE = PROJECT / "examples" / "trainer_fit.py"
STEPS, SAVE, EVAL = 300, 75, 150


_OPTIONS = ("--steps", str(STEPS), "--save", str(SAVE), "--eval", str(EVAL))


@pytest.fixture(scope="module", autouse=True)
def framework():
    """Transformers is here, or these tests are skipped."""
    require("transformers", "transformers accelerate")


class Trained(Ended):
    """What a run has left."""

    def digest(self, attempt=0):
        """Return the digest of the weights that both ranks have ended with."""
        [digest] = {end["digest"] for end in self.told("end", attempt)}
        return digest

    def checkpoints(self):
        """Return the names of the trainer's checkpoints."""
        return sorted(path.name for path in (self.run.run_dir / "trainer").glob("checkpoint-*"))


def end_of(folder, *args, **env):
    """Run the script on two ranks to its end."""
    run = ended(folder, "transformers_training.py", *_OPTIONS, *args, framework="transformers", **env)
    return Trained(run.code, run.run, run.screen)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A training that is not interrupted, on a disk that has no room for one of its saves."""
    return end_of(tmp_path_factory.mktemp("straight") / "run", "--no-room-at", 2 * SAVE)


def test_a_save_that_fails_is_survived(straight):
    """The other rank hears of it too, nothing of it stays, and the training goes on."""
    assert straight.code == 0, straight.screen
    assert "checkpoint at step 150 failed: rank 0: " in straight.screen
    assert "training goes on, the last good one is step 75" in straight.screen
    assert [event["step"] for event in straight.run.events("ckpt_commit")] == [75, 225, 300]
    assert straight.checkpoints() == ["checkpoint-300"]


def test_evaluations_and_saves_are_sections(straight):
    """Neither is part of a step. Each forward has told how many tokens it has."""
    for end in straight.told("end"):
        assert end["passes"]["eval"] == 2
        assert end["passes"]["checkpoint"] == 4
        assert end["passes"]["calls"] == end["passes"]["fwd"] == STEPS


def test_killed_in_a_save_it_resumes_the_one_before(straight, tmp_path):
    """Though only one was to be kept: it goes when the next one is complete. One line says what is passed over."""
    ended = end_of(tmp_path / "run", "--die-in-save", 2 * SAVE)
    assert ended.code == 0, ended.screen
    assert [each["step"] for each in ended.told("start", attempt=1)] == [SAVE, SAVE]
    assert "checkpoint-75: step 75 is next, passed over: checkpoint-150: its save did not end" in ended.screen
    assert ended.digest(attempt=1) == straight.digest()
    assert ended.checkpoints() == ["checkpoint-300"]


def test_asked_to_leave_beside_transformers_own_handler(straight, tmp_path):
    """That one would save on one rank alone. What resumes ends with the weights of a training that never stopped."""
    ended = end_of(tmp_path / "run", "--jit", "--asked-at", 101, RESILIENCE_FAULT="preempt:rank=1,step=100")
    assert ended.code == 75, ended.screen
    assert "enable_jit_checkpoint=True" in ended.screen
    [step] = {each["step"] for each in ended.told("step")}
    assert ended.checkpoints() == [f"checkpoint-{step}"]
    resumed = end_of(tmp_path / "run", "--jit")
    assert resumed.code == 0, resumed.screen
    assert [each["step"] for each in resumed.told("start")] == [step, step]
    assert resumed.digest() == straight.digest()


def test_a_sharded_model_is_killed_leaves_and_resumes(tmp_path):
    """FSDP2: every rank saves its parts, and the mark knows of all of them."""
    options = ("--fsdp", "--shard-on-cpu", "--save", 5)
    faults = "kill:rank=1,step=7;preempt:rank=1,step=8,attempt=1"
    left = end_of(tmp_path / "run", *options, "--steps", 100_000, RESILIENCE_FAULT=faults)
    assert left.code == 75, left.screen
    assert [each["step"] for each in left.told("start", attempt=1)] == [5, 5]
    [step] = {each["step"] for each in left.told("step", attempt=1)}
    assert left.checkpoints() == [f"checkpoint-{step}"]
    files = json.loads((left.run.run_dir / "trainer" / f"checkpoint-{step}" / "resilience.json").read_text())["files"]
    assert {
        f"{part}_0/{name}" for part in ("pytorch_model_fsdp", "optimizer") for name in (".metadata", "__1_0.distcp")
    } <= {*files}
    ended = end_of(tmp_path / "run", *options, "--steps", step + 2)
    assert ended.code == 0, ended.screen
    assert [each["step"] for each in ended.told("start")] == [step, step]
    assert [end["kinds"] for end in ended.told("end")] == [["DTensor"], ["DTensor"]]


def test_one_process_trains_again_and_again(tmp_path):
    """What is complete is trained no further; an exception leaves nothing behind, nor do many trainings."""
    with job(tmp_path, "transformers_alone.py", command=(sys.executable,)) as run:
        assert run.finish(90.0) == 0, run.screen
        seen = json.loads(run.out.splitlines()[-1])
        assert run.incidents() == []
    assert seen["first"] == {"steps": 10, "finished": True}
    assert seen["complete"] == {"steps": 0, "step": 10}
    assert seen["raised"] == {"error": "this step is bad", "open": [], "hidden": ["train"]}
    assert "the training ended by ValueError; the newest checkpoint is after 10 steps; to resume: " in run.screen
    assert "has a loop attached already" in seen["second"]
    assert seen["other"]["step"] == 5
    assert seen["other"]["open"] == []
    assert "the run directory knows those of" in run.screen
    assert seen["after"] == seen["before"]


def test_the_example_resumes_under_our_launcher(tmp_path):
    """Killed behind its second save, it goes on from there."""
    with job(
        tmp_path, "--nproc-per-node", "2", EXAMPLE, "--steps", "110", env={"RESILIENCE_FAULT": "kill:rank=1,step=105"}
    ) as run:
        assert run.finish(90.0) == 0, run.screen
        assert "step 100 is next" in run.screen
        assert "finished after step 110" in run.out
        [incident] = run.incidents()
        assert incident["kind"] == "crash"
        assert incident["lost_steps"] in steps_lost(105, 100)


@pytest.mark.release
def test_the_example_runs_under_torchrun(tmp_path):
    """It finishes, and rank 0 sets the flag."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with job(tmp_path, EXAMPLE, "--steps", "20", command=torchrun) as run:
        assert run.finish(90.0) == 0, run.screen
        assert "finished after step 20" in run.out
        assert (run.run_dir / "finished").exists()


@pytest.mark.release
def test_the_example_runs_under_python(tmp_path):
    """It finishes, and started again it has nothing left to do."""
    for _ in range(2):
        with job(tmp_path, EXAMPLE, "--steps", "20", command=(sys.executable,)) as run:
            assert run.finish(90.0) == 0, run.screen
            assert "finished after step 20" in run.out
            assert (run.run_dir / "finished").exists()
    assert "step 20 is next" in run.screen
