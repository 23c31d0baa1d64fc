"""Links of the owner's to other storage, in a run directory: followed where nobody else can change what is there."""

import os

import pytest

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.incidents import Incident, IncidentStore

PARTS = ["checkpoints", "incidents", "journal", "logs"]


@pytest.fixture
def scratch(tmp_path):
    """A directory that stands for other storage, beside a run directory that holds nothing yet."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "scratch").mkdir(mode=0o700)
    return tmp_path / "scratch"


def linked(tmp_path, name, target):
    """Link a part of the run directory there; return the run directory."""
    (tmp_path / "run" / name).symlink_to(target)
    return tmp_path / "run"


def test_checkpoints_go_through_a_link_and_come_back(tmp_path, scratch):
    """Saved, pruned, resumed and told; also where one checkpoint alone is a link, and the run directory itself."""
    import torch

    run = linked(tmp_path, "checkpoints", scratch)
    (tmp_path / "by-link").symlink_to(run)
    state = {"weight": torch.zeros(3)}
    saver = Checkpointer(state, run_dir=tmp_path / "by-link")
    for step in (1, 2, 3):
        state["weight"] += 1
        assert saver.save(step)
    assert sorted(path.name for path in scratch.glob("step-*")) == ["step-00000002", "step-00000003"]
    elsewhere = tmp_path / "elsewhere"
    (scratch / "step-00000003").rename(elsewhere)
    (scratch / "step-00000003").symlink_to(elsewhere)
    found = {"weight": torch.zeros(3)}
    assert newest_checkpoint(RunDirectory.open(run)) == 3
    again = Checkpointer(found, run_dir=run)
    assert again.resume() == 3
    assert found["weight"].tolist() == [3, 3, 3]
    for step in (4, 5, 6):
        assert again.save(step)
    assert not (scratch / "step-00000003").is_symlink()  # it went as the others did
    assert (elsewhere / "manifest.json").exists()  # what the link led to is the owner's


def test_incidents_are_written_and_read_through_a_link(tmp_path, scratch):
    """As `why` does."""
    run = RunDirectory.create(linked(tmp_path, "incidents", scratch))
    store = IncidentStore(run.path)
    store.create("crash", Incident(kind="crash", attempt=0, detected_at=1.0), {}, {})
    assert [one.kind for one in store.all()] == ["crash"]
    assert (scratch / "0001-crash" / "report.json").exists()


@pytest.mark.parametrize("name", PARTS)
def test_a_link_that_leads_nowhere_is_refused_by_name(tmp_path, scratch, name):
    """With what it leads to and the cure, before anything is written."""
    run = linked(tmp_path, name, tmp_path / "gone")
    with pytest.raises(RunDirectoryError, match=f"{name} is a link to .*gone, which cannot be reached .*mkdir -p"):
        RunDirectory.create(run)


@pytest.mark.parametrize("name", PARTS)
def test_a_link_to_a_file_is_refused(tmp_path, scratch, name):
    """It is no place for anything."""
    (scratch / "file").touch()
    run = linked(tmp_path, name, scratch / "file")
    with pytest.raises(RunDirectoryError, match=f"{name} is a link to .*file, which is no directory"):
        RunDirectory.create(run)


def test_a_run_directory_that_is_a_link_to_nothing_is_refused(tmp_path):
    """Named, as its parts are."""
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(RunDirectoryError, match=r"run is a link to .*gone, which cannot be reached"):
        RunDirectory.create(tmp_path / "run")


def test_what_others_may_write_to_is_refused(tmp_path, scratch):
    """A resume would refuse what is saved there."""
    scratch.chmod(0o775)
    run = linked(tmp_path, "checkpoints", scratch)
    with pytest.raises(RunDirectoryError, match="which others may write to: run chmod go-w"):
        RunDirectory.create(run)


def test_what_others_can_replace_is_refused_unless_the_bit_for_that_is_set(tmp_path, scratch):
    """In a directory that all may write to, anyone can put another directory in its place."""
    scratch.chmod(0o777)
    (scratch / "mine").mkdir(mode=0o700)
    run = linked(tmp_path, "checkpoints", scratch / "mine")
    with pytest.raises(RunDirectoryError, match=r"which others can replace.*chmod \+t"):
        RunDirectory.create(run)
    scratch.chmod(0o1777)
    RunDirectory.create(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to somebody")
def test_what_belongs_to_another_user_is_refused(tmp_path, scratch):
    """The directory, or the link."""
    os.chown(scratch, 65534, 65534)
    run = linked(tmp_path, "checkpoints", scratch)
    with pytest.raises(RunDirectoryError, match="which belongs to user 65534"):
        RunDirectory.create(run)
    os.chown(scratch, 0, 0)
    os.chown(run / "checkpoints", 65534, 65534, follow_symlinks=False)
    with pytest.raises(RunDirectoryError, match="that belongs to user 65534: make it yourself"):
        RunDirectory.create(run)
