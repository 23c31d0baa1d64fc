"""A full disk costs the log, not the job; a directory that is removed while ranks run is made again where it was."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_runs import Run, launch

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
TWO = ["--nproc-per-node", "2"]
LATER_S = 120


def mount(place: Path, options: str) -> None:
    """Mount a file system of its own."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", place], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Return a file system with room for 2 MiB and 300 files."""
    place = tmp_path / "small"
    mount(place, "size=2m,nr_inodes=300")
    yield place
    while os.path.ismount(place):
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path, what: str) -> list[Path]:
    """Leave no room in a file system, for `bytes` or for files; return what has to go for there to be room again."""
    made = []
    if what == "bytes":
        made.append(place / "ballast")
        with open(made[0], "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return made
    while True:
        try:
            (place / f"ballast-{len(made)}").touch()
        except OSError:
            return made
        made.append(place / f"ballast-{len(made)}")


def start(tmp_path: Path, run_dir: Path, *options: str) -> Run:
    """Start two ranks that print until `end` is there."""
    words = [*TWO, *options, "printing_ranks.py", str(tmp_path / "end")]
    return launch(tmp_path, *words, env={"TOLD": str(tmp_path)}, run_dir=run_dir)


def await_step(run: Run, told: Path, attempt: int) -> None:
    """Wait until both ranks of an attempt have gone some steps further."""
    for rank in (0, 1):
        path = told / f"step-{attempt}-{rank}"
        first = int(run.wait_for(path, LATER_S))
        until = time.monotonic() + LATER_S
        while int(path.read_text()) < first + 5:
            assert time.monotonic() < until
            time.sleep(0.02)


def kill_rank(told: Path, attempt: int) -> None:
    """Kill rank 1 of an attempt."""
    os.kill(int((told / f"pid-{attempt}-1").read_text()), signal.SIGKILL)


@ROOT_ONLY
@pytest.mark.slow
@pytest.mark.parametrize(("what", "method"), [("bytes", "exec"), ("files", "forkserver")])
def test_a_rank_dies_while_the_disk_is_full(tmp_path: Path, small: Path, what: str, method: str):
    """The next attempt begins without room for its logs; what could not be written is there once there is room."""
    run = start(tmp_path, small / "run", "--start-method", method, "--tee", "3", "--max-restarts", "1")
    await_step(run, tmp_path, 0)
    ballast = fill(small, what)
    await_step(run, tmp_path, 0)  # who prints lives on
    kill_rank(tmp_path, 0)
    await_step(run, tmp_path, 1)
    for path in ballast:
        path.unlink()
    await_step(run, tmp_path, 1)
    (tmp_path / "end").touch()
    assert run.finish(LATER_S) == 0, run.err
    said = run.out + run.err
    assert "rank 0 has finished attempt 1" in said
    assert [event["ended_by"] for event in run.events("attempt_end")] == ["ranks", "ranks"]
    assert len(run.events("attempt_start")) == 2
    assert [event["restarts_left"] for event in run.events("decision")][:1] == [0]
    assert [found["cause"] for found in run.incidents()] == ["rank_killed_sigkill"]
    assert run.outcome()["verdict"] == "finished"
    print(said)


@pytest.mark.slow
def test_a_directory_that_is_removed_is_made_again(tmp_path: Path):
    """What its processes know of the job is in it then; what is said of it is true."""
    run = start(tmp_path, tmp_path / "run", "--max-restarts", "1")
    await_step(run, tmp_path, 0)
    shutil.rmtree(run.run_dir)
    run.wait_for(run.run_dir / "journal" / ".." / ".gitignore", LATER_S)
    kill_rank(tmp_path, 0)
    await_step(run, tmp_path, 1)
    (tmp_path / "end").touch()
    assert run.finish(LATER_S) == 0, run.err
    assert "was removed while the job runs" in run.err
    assert run.err.count("was removed while the job runs") == 1
    assert [event["what"] for event in run.events("degraded")] == ["run directory"]
    assert len(run.events("run_start")) == len(run.events("finished")) == 1
    assert [found["cause"] for found in run.incidents()] == ["rank_killed_sigkill"]
    assert run.outcome()["verdict"] == "finished"


@ROOT_ONLY
@pytest.mark.slow
@pytest.mark.parametrize("where", ["at the mount", pytest.param("below it", marks=pytest.mark.release)])
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_mount_that_is_gone_is_not_written_under(tmp_path: Path, small: Path, where: str, comes_back: bool):
    """The next attempt waits for it, and begins where it was; for one that stays away the job ends with 1."""
    run_dir = small if where == "at the mount" else small / "run"
    limit = [] if comes_back else ["--wait-limit", "3"]
    run = start(tmp_path, run_dir, "--max-restarts", "1", *limit)
    await_step(run, tmp_path, 0)
    kept = tmp_path / "kept"
    kept.mkdir()
    subprocess.run(["mount", "--bind", small, kept], check=True)
    try:
        subprocess.run(["umount", "-l", small], check=True)
        kill_rank(tmp_path, 0)
        if comes_back:
            time.sleep(3)
            assert not (tmp_path / "pid-1-1").exists()
            assert os.listdir(small) == []
            subprocess.run(["mount", "--bind", kept, small], check=True)
            await_step(run, tmp_path, 1)
            (tmp_path / "end").touch()
            assert run.finish(LATER_S) == 0, run.err
            assert "is there again" in run.err
            assert run.outcome()["verdict"] == "finished"
        else:
            assert run.finish(LATER_S) == 1, run.err
            assert os.listdir(small) == []
            assert "the run directory cannot be used" in run.err
    finally:
        run.process.kill()
        subprocess.run(["umount", "-l", kept], check=True)


@ROOT_ONLY
@pytest.mark.slow
def test_a_place_for_pages_that_has_no_room_costs_no_checkpoint(tmp_path: Path):
    """What is said is what is so: nobody watches, and the checkpoints are there."""
    mount(tmp_path / "pages", "size=64k")
    try:
        run = launch(tmp_path, "--nproc-per-node", "1", "saving.py")
        assert run.finish(LATER_S) == 0, run.err
    finally:
        subprocess.run(["umount", "-l", tmp_path / "pages"], check=True)
    assert "hangs and slow ranks are not seen; checkpoints are written all the same" in run.err
    assert (run.run_dir / "checkpoints" / "step-00000006" / "manifest.json").exists()


@ROOT_ONLY
@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_flag_that_cannot_be_set_is_waited_for(tmp_path: Path, small: Path, comes_back: bool):
    """Without it a rerun would train again: the job has finished once the flag is there, and else it has failed."""
    limit = [] if comes_back else ["--wait-limit", "2"]
    run = start(tmp_path, small / "run", *limit)
    await_step(run, tmp_path, 0)
    ballast = fill(small, "files")
    (tmp_path / "end").touch()
    if comes_back:
        assert run.process.stderr is not None
        said = []
        while "finished: No space left on device" not in "".join(said):
            said.append(line := run.process.stderr.readline())
            assert line
        for path in ballast:
            path.unlink()
        assert run.finish(LATER_S) == 0, run.err
        assert (run.run_dir / "finished").exists()
        assert run.outcome()["verdict"] == "finished"
    else:
        assert run.finish(LATER_S) == 1, run.err
        assert "all ranks exited with 0, but cannot write" in run.err
        assert not (run.run_dir / "finished").exists()
