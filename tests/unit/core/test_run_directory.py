"""The run directory: who may use it, how it is named, and its flag."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from resilience_sdk.core.run_directory import RunDirectory, choose_run_dir, newest_run_dir
from resilience_sdk.errors import RunDirectoryError


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("group", "mode"), [(False, 0o700), (True, 0o750)])
def test_create(tmp_path: Path, group: bool, mode: int) -> None:
    """It is private whatever the umask is, complete, and hidden from git; a second time changes nothing."""
    before = os.umask(0o027)
    try:
        run = RunDirectory.create(tmp_path / "a" / "run", group_readable=group)
    finally:
        os.umask(before)
    for path in (run.path, run.journal, run.incidents, run.checkpoints):
        assert _mode(path) == mode
    assert (run.path / ".gitignore").read_text() == "*\n"
    (run.path / ".gitignore").write_text("mine\n")
    assert RunDirectory.create(run.path) == run
    assert (run.path / ".gitignore").read_text() == "mine\n"
    assert os.fspath(run) == str(run.path)


def test_an_empty_directory_becomes_private(tmp_path: Path) -> None:
    """`mkdir out; --run-dir out` is the usual way, and its mode is the umask's."""
    (tmp_path / "out").mkdir(mode=0o755)
    assert _mode(RunDirectory.create(tmp_path / "out").path) == 0o700


def test_a_users_own_directory_is_not_hidden_from_git(tmp_path: Path) -> None:
    """In a directory with other things, only our parts are ignored, and its mode stays."""
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").touch()
    run = RunDirectory.create(tmp_path)
    assert not (tmp_path / ".gitignore").exists()
    assert (run.journal / ".gitignore").read_text() == "*\n"
    assert _mode(tmp_path) == 0o755


def test_directories_that_others_can_write_are_refused(tmp_path: Path) -> None:
    """What another user can change is never trusted; the cure is in the message."""
    (tmp_path / "x").touch()
    tmp_path.chmod(0o777)
    with pytest.raises(RunDirectoryError, match=r"chmod go-w"):
        RunDirectory.create(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root owns and reads everything")
def test_directories_of_others_are_refused() -> None:
    """The error says whose it is and names the cure."""
    with pytest.raises(RunDirectoryError, match=r"belongs to root.*--run-dir"):
        RunDirectory.create("/usr")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory away")
def test_a_directory_given_to_another_user_is_refused(tmp_path: Path) -> None:
    """The error says whose it is and names the cure."""
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    with pytest.raises(RunDirectoryError, match=r"belongs to .*--run-dir"):
        RunDirectory.create(other)


def test_files_in_the_way(tmp_path: Path) -> None:
    """A file where a directory should be is named, above, at and below the run directory."""
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "run"):
        with pytest.raises(RunDirectoryError, match="--run-dir"):
            RunDirectory.create(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(tmp_path: Path) -> None:
    """Reading and writing commands both say what is wrong."""
    run = RunDirectory.create(tmp_path / "run")
    run.path.chmod(0)
    try:
        with pytest.raises(RunDirectoryError, match="cannot read"):
            RunDirectory.open(run.path)
        with pytest.raises(RunDirectoryError, match="cannot"):
            RunDirectory.create(run.path)
    finally:
        run.path.chmod(0o700)


def test_open(tmp_path: Path) -> None:
    """Only what looks like a run directory is opened; each refusal says what to name instead."""
    run = RunDirectory.create(tmp_path / "run")
    assert RunDirectory.open(run.path) == run
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path / "nothing", "no run directory"),
        (tmp_path / "file", "is a file"),
        (tmp_path, "no journal"),
    ):
        with pytest.raises(RunDirectoryError, match=message):
            RunDirectory.open(path)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, the scheduler's, or new at every start: only the first two may be resumed from."""
    monkeypatch.chdir(tmp_path)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    assert choose_run_dir("t.py", {"RESILIENCE_RUN_DIR": "b", **slurm}, "a") == (tmp_path / "a", True)
    assert choose_run_dir("t.py", {"RESILIENCE_RUN_DIR": "b", **slurm}, None) == (tmp_path / "b", True)
    assert choose_run_dir("t.py", slurm, None) == (tmp_path / "resilience-runs" / "slurm-77_3", True)
    first, named = choose_run_dir("code/my train.py", {}, None)
    assert not named
    assert first.parent == tmp_path / "resilience-runs"
    assert first.name.startswith("my_train-2")
    assert choose_run_dir("code/my train.py", {}, None)[0] != first
    assert choose_run_dir("..", {}, None)[0].name.startswith("run-")
    assert not first.exists()


def test_newest(tmp_path: Path) -> None:
    """The newest is the one in which something was started last, whatever it is called."""
    for name, at in (("b", 300), ("a", 500), ("c", 400)):
        run = RunDirectory.create(tmp_path / name)
        for place in (run.journal, run.incidents, run.checkpoints):
            os.utime(place, (at, at))
    (tmp_path / "z-not-a-run").mkdir()
    assert newest_run_dir({}, tmp_path) == tmp_path / "a"
    assert newest_run_dir({"RESILIENCE_RUN_DIR": "/named"}, tmp_path) == Path("/named")
    with pytest.raises(RunDirectoryError, match="name one"):
        newest_run_dir({}, tmp_path / "nothing")


def test_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is set here and where the other extension's tools look; a bad place there is said."""
    run = RunDirectory.create(tmp_path / "run")
    assert not run.is_finished()
    run.mark_finished({"FAULT_TOL_FINISHED_FLAG_FILE": str(tmp_path / "flag")})
    assert run.is_finished()
    assert (tmp_path / "flag").exists()
    run.mark_finished({"FAULT_TOL_FINISHED_FLAG_FILE": str(tmp_path / "no" / "flag")})
    assert "FAULT_TOL_FINISHED_FLAG_FILE" in capsys.readouterr().err


def test_set_aside(tmp_path: Path) -> None:
    """A fresh start finds nothing, and nothing is lost."""
    run = RunDirectory.create(tmp_path / "run")
    run.mark_finished({})
    aside = run.set_aside()
    assert aside is not None
    assert (aside / "finished").exists()
    assert not run.path.exists()
    assert run.set_aside() is None
