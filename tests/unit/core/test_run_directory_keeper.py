"""A run directory that goes away while a job runs."""

import os
import shutil

import pytest

from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.run_directory_keeper import RunDirectoryKeeper
from resilience_sdk.system import same_device


@pytest.fixture
def keep(tmp_path):
    """Return a function that keeps a run directory without looking by itself."""
    kept = []

    def begin(run_dir: RunDirectory) -> RunDirectoryKeeper:
        journal = Journal(run_dir.journal, writer="launcher", host="here", boot_id="", job="job")
        keeper = RunDirectoryKeeper(run_dir, journal, group_readable=False)
        kept.append((keeper, journal))
        keeper.close()  # the test looks
        return keeper

    yield begin
    for _, journal in kept:
        journal.close()
    same_device._devices.clear()


def test_what_was_removed_is_made_again_and_said_each_time(tmp_path, keep, capsys):
    """All of it, or a part; it is said what is gone with it, and journalled there."""
    run_dir = RunDirectory.create(tmp_path / "run")
    keeper = keep(run_dir)
    keeper.look()
    assert capsys.readouterr().err == ""
    shutil.rmtree(run_dir.path)
    keeper.look()
    shutil.rmtree(run_dir.checkpoints)
    keeper.look()
    assert run_dir.checkpoints.is_dir()
    assert keeper.problem is None
    assert capsys.readouterr().err.count("was removed while the job runs") == 2
    assert [event["what"] for event in read_journal(run_dir.journal).events] == ["run directory"] * 2


def test_a_link_of_the_owners_is_made_again(tmp_path, keep):
    """The checkpoints are on another storage: there they stay."""
    run_dir = RunDirectory.create(tmp_path / "run")
    (tmp_path / "scratch").mkdir()
    run_dir.checkpoints.rmdir()
    run_dir.checkpoints.symlink_to(tmp_path / "scratch")
    keeper = keep(run_dir)
    shutil.rmtree(run_dir.path)
    keeper.look()
    assert os.readlink(run_dir.checkpoints) == str(tmp_path / "scratch")
    run_dir.checkpoints.unlink()
    keeper.look()
    assert os.readlink(run_dir.checkpoints) == str(tmp_path / "scratch")


def test_nothing_is_made_where_another_file_system_is(tmp_path, keep, capsys):
    """It is said once, and once that it is over; who waits for it waits so long."""
    run_dir = RunDirectory.create(tmp_path / "run")
    keeper = keep(run_dir)
    device = run_dir.path.stat().st_dev
    shutil.rmtree(run_dir.path)
    same_device.remember(run_dir.path, device + 1)
    slept = []
    why = keeper.wait(lambda seconds: slept.append(seconds) is None, 3.5)
    assert "another file system is there" in str(why)
    assert slept == [1.0, 1.0, 1.0, 0.5]
    assert not run_dir.path.exists()
    same_device.remember(run_dir.path, device)
    RunDirectory.create(run_dir.path)
    assert keeper.wait(lambda seconds: False, 3.5) is None
    said = capsys.readouterr().err
    assert said.count("nothing is written in its place") == said.count("run is there again") == 1


def test_a_file_in_its_place_is_reported(tmp_path, keep, capsys):
    """Whoever put it there can mend that."""
    run_dir = RunDirectory.create(tmp_path / "run")
    keeper = keep(run_dir)
    shutil.rmtree(run_dir.path)
    run_dir.path.write_text("")
    keeper.look()
    assert "is not a directory" in str(keeper.problem)
    assert "cannot be used" in capsys.readouterr().err
