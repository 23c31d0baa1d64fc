"""The newest good state for the words of an end: what a resume would take, without its reading of every byte."""

import pytest
import torch

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.newest import NewestFinder, newest_checkpoint
from resilience_sdk.core.journal import Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import CheckpointError


@pytest.fixture
def run(tmp_path):
    """A run directory with checkpoints after 1 and 2 steps, and what makes another `Checkpointer` of it."""
    run_dir = RunDirectory.create(tmp_path / "run")
    journal = Journal(run_dir.journal, writer="rank0", host="h", boot_id="b", job="j")

    def saver():
        return Checkpointer({"weight": torch.zeros(64)}, run_dir=run_dir, journal=journal)

    first = saver()
    assert first.save(1)
    assert first.save(2)
    return run_dir, saver


def damage(run_dir, step):
    """Change a byte of a checkpoint, not its size; return what was there."""
    path = run_dir.checkpoints / f"step-{step:08d}" / "state.pt"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    return path, data


def test_what_a_resume_found_damaged_is_believed_until_it_is_repaired(run):
    """Before anybody has read it, nobody knows; a copy that is put back counts again."""
    run_dir, saver = run
    finder = NewestFinder(run_dir)
    path, data = damage(run_dir, 2)
    assert finder.find().step == 2
    assert saver().resume() == 1
    assert finder.find().step == newest_checkpoint(run_dir) == 1
    assert finder.find().not_taken == ("step-00000002: state.pt does not match its checksum",)
    damage(run_dir, 1)
    with pytest.raises(CheckpointError, match="all 2 checkpoints"):
        saver().resume()
    assert finder.find().step is None
    assert len(finder.find().not_taken) == 2
    path.write_bytes(data)
    assert finder.find().step == saver().resume() == 2


def test_one_of_another_size_or_that_others_may_write_is_not_told_as_good(run):
    """As a resume has it, before any has looked."""
    run_dir, _ = run
    with (run_dir.checkpoints / "step-00000002" / "state.pt").open("ab") as file:
        file.write(b"x")
    assert newest_checkpoint(run_dir) == 1
    (run_dir.checkpoints / "step-00000001").chmod(0o777)
    assert newest_checkpoint(run_dir) is None
