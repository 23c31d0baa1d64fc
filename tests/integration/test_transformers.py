"""A Trainer that is killed in a save, finds no room for one, or is asked to leave, ends with the very same weights."""

from __future__ import annotations

import json

import attrs
import pytest
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow

STEPS, SAVE, EVAL = 300, 75, 150


_OPTIONS = ("--steps", str(STEPS), "--save", str(SAVE), "--eval", str(EVAL))


@pytest.fixture(scope="module", autouse=True)
def framework():
    """Transformers is here, or these tests are skipped."""
    require("transformers", "transformers accelerate")


@attrs.frozen
class Ended:
    """What a run has left."""

    code: int
    run: object
    screen: str

    def told(self, name, attempt=0):
        """Return what each rank has told under that name."""
        return [json.loads(path.read_text()) for path in self.run.told(f"{name}-{attempt}-[0-9]")]

    def digest(self, attempt=0):
        """Return the digest of the weights that both ranks have ended with."""
        [digest] = {end["digest"] for end in self.told("end", attempt)}
        return digest

    def checkpoints(self):
        """Return the names of the trainer's checkpoints."""
        return sorted(path.name for path in (self.run.run_dir / "trainer").glob("checkpoint-*"))


def end_of(folder, *args, **env):
    """Run the script on two ranks to its end."""
    folder.mkdir(exist_ok=True)
    command = ("--nproc-per-node", "2", "transformers_training.py", *_OPTIONS, *map(str, args))
    with job(folder, *command, env=env) as run:
        return Ended(run.finish(90.0), run, run.screen)


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
    """Neither is part of a step."""
    for end in straight.told("end"):
        assert end["passes"]["eval"] == 2
        assert end["passes"]["checkpoint"] == 4


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
    ended = end_of(tmp_path / "run", "--jit", RESILIENCE_FAULT="preempt:rank=1,step=100")
    assert ended.code == 75, ended.screen
    assert "enable_jit_checkpoint=True" in ended.screen
    [step] = {each["step"] for each in ended.told("step")}
    assert ended.checkpoints() == [f"checkpoint-{step}"]
    resumed = end_of(tmp_path / "run", "--jit")
    assert resumed.code == 0, resumed.screen
    assert [each["step"] for each in resumed.told("start")] == [step, step]
    assert resumed.digest() == straight.digest()
