"""Checkpoints with files that a framework writes by itself, and how it is told which one to load."""

import os
import subprocess
import sys
import threading
import types

import pytest
import torch

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.capture import RankPart, write_part
from resilience_sdk.checkpoint.manifest import SHARDED, FileEntry
from resilience_sdk.checkpoint.memory_staging import MemoryStaging, _own_name, sweep
from resilience_sdk.checkpoint.store import verify_checkpoint


def writer(directory):
    """Write a file, and a directory of parts, as open to others as a careless umask leaves them."""
    before = os.umask(0)
    try:
        (directory / "model.bin").write_bytes(b"weights")
        (directory / SHARDED).mkdir()
        (directory / SHARDED / "__0_0.distcp").write_bytes(b"part")
        (directory / SHARDED / "meta.pt").write_bytes(b"more")
        (directory / "optimizer_0").mkdir()
        (directory / "optimizer_0" / ".metadata").write_bytes(b"map")
    finally:
        os.umask(before)


def checkpointer(run_dir, write=writer):
    return Checkpointer({}, run_dir=run_dir, every=1, writer=write)


def test_what_it_writes_is_a_part_of_the_checkpoint(tmp_path):
    """Each file is in the manifest with its checksum, and nobody else can write it."""
    assert checkpointer(tmp_path).save(3)
    place = tmp_path / "checkpoints" / "step-00000003"
    names = verify_checkpoint(place).names()
    assert {
        "model.bin",
        f"{SHARDED}/__0_0.distcp",
        f"{SHARDED}/meta.pt",
        "optimizer_0/.metadata",
        "rank-00000.json",
    } <= names
    assert place.joinpath("model.bin").stat().st_mode & 0o077 == 0
    for name in (SHARDED, "optimizer_0"):
        assert place.joinpath(name).stat().st_mode & 0o077 == 0


def test_a_writer_that_fails_leaves_no_checkpoint(tmp_path, capsys):
    """It is said, and training goes on."""

    def fail(directory):
        (directory / "model.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert not checkpointer(tmp_path, fail).save(3)
    assert "No space left" in capsys.readouterr().err
    assert [name for name in os.listdir(tmp_path / "checkpoints") if not name.startswith(".git")] == []


def test_its_files_do_not_hinder_the_resume_of_the_rest(tmp_path):
    """Values and random numbers are restored; the place is known."""
    first = checkpointer(tmp_path)
    first.values["best"] = 0.5
    torch.manual_seed(5)
    first.save(3)
    drawn = torch.rand(1)
    second = checkpointer(tmp_path)
    assert second.resume() == 3
    assert second.values == {"best": 0.5}
    assert second.last_good.path.joinpath("model.bin").read_bytes() == b"weights"
    assert torch.equal(torch.rand(1), drawn)


def test_find_tells_what_resume_will_load(tmp_path, capsys):
    """Also where the newest one is damaged; the words come once."""
    assert checkpointer(tmp_path).find() is None
    for step in (3, 4):
        checkpointer(tmp_path).save(step)
    (tmp_path / "checkpoints" / "step-00000004" / "model.bin").write_bytes(b"rotten!")
    found = checkpointer(tmp_path)
    assert found.find().step == 3
    assert found.resume() == 3
    assert capsys.readouterr().err.count("skipped checkpoint step-00000004") == 1


def test_find_is_silent_and_changes_nothing_on_other_ranks(tmp_path, capsys, monkeypatch):
    """Rank 0 alone speaks, and removes what killed writers left."""
    checkpointer(tmp_path).save(3)
    leftover = tmp_path / "checkpoints" / ".tmp-step-00000009-x"
    leftover.mkdir()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert checkpointer(tmp_path).find().step == 3
    assert leftover.exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("background", [True, False])
def test_it_writes_in_the_thread_that_trains(tmp_path, background):
    """Whatever was asked for: a framework's own save is not for another thread."""
    import threading

    threads = []
    own = Checkpointer(
        {},
        run_dir=tmp_path,
        every=1,
        in_background=background,
        writer=lambda _directory: threads.append(threading.current_thread()),
    )
    own.maybe_save(1)
    assert threads == [threading.main_thread()]


@pytest.mark.parametrize(
    ("rank", "names"), [(0, ["model_0/.metadata", "model_0/__0_0.distcp"]), (1, ["model_0/__1_0.distcp"])]
)
def test_each_rank_reads_its_own_shards_back(tmp_path, rank, names):
    """Rank 0 would have to read those of all, while the others wait for it."""

    def write(directory):
        (directory / "model_0").mkdir()
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "other"):
            (directory / "model_0" / name).write_bytes(b"part")

    part = RankPart(document={}, own={}, shared={}, spread={}, values="{}", writer=write)
    answer = write_part(part, tmp_path, types.SimpleNamespace(rank=rank, size=2), mode=0o600)
    assert answer["error"] is None
    files = [FileEntry.from_json(entry).name for entry in answer["files"]]
    assert sorted(name for name in files if "/" in name) == names


def test_each_rank_reads_the_files_back_that_a_writer_names(tmp_path):
    """Those of a framework that has a file for each rank, and no shards of torch's."""

    def write(directory):
        for name in ("own.pt", "other.pt", ".hidden"):
            (directory / name).write_bytes(b"part")
        return frozenset({"own.pt", ".hidden"})

    part = RankPart(document={}, own={}, shared={}, spread={}, values="{}", writer=write)
    answer = write_part(part, tmp_path, types.SimpleNamespace(rank=1, size=2), mode=0o600)
    names = {FileEntry.from_json(entry).name for entry in answer["files"]}
    assert {name for name in names if name.endswith(".pt") or name.startswith(".")} == {"own.pt"}
    for in_background in (False, True):
        saver = Checkpointer({}, run_dir=tmp_path / "run", every=1, writer=write, in_background=in_background)
        assert saver.maybe_save(1 + in_background)
        assert saver.wait()
        assert {"own.pt", "other.pt"} <= verify_checkpoint(saver.last_good.path).names()


def test_a_rank_that_does_not_see_the_directory_says_so_before_it_writes(tmp_path):
    """The framework would make it on that node alone, and the checkpoint would be taken for a whole one."""
    saver = checkpointer(tmp_path)._saver
    other = types.SimpleNamespace(rank=1, size=2)
    order = {"error": None, "values": "{}"}
    assert (
        "put the run directory on storage"
        in saver._take_part(3, other, tmp_path / "elsewhere", order, False)[1]["error"]
    )
    (tmp_path / "here").mkdir()
    assert saver._take_part(3, other, tmp_path / "here", order, False)[1]["error"] is None


@pytest.mark.parametrize("name", ["my model.bin", ".hidden", "part one/model.bin", "part one/.metadata"])
def test_a_name_that_no_manifest_may_list_does_not_spoil_the_rest(tmp_path, capsys, name):
    """The checkpoint can be resumed, with that file in it, which is said to be unchecked."""

    def write(directory):
        writer(directory)
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"weights")

    assert checkpointer(tmp_path, write).save(3)
    assert f"{name!r} is saved, but not checked at a resume" in capsys.readouterr().err
    again = checkpointer(tmp_path)
    assert again.resume() == 3
    assert (again.last_good.path / name).read_bytes() == b"weights"


# -- in the background


def staged(run_dir, stager, write=writer):
    return Checkpointer({}, run_dir=run_dir, every=1, writer=write, stager=stager, in_background=True)


def test_what_is_taken_is_written_by_a_thread(tmp_path):
    """The training waits until it is taken, and not until it is written."""
    may_write, threads = threading.Event(), []

    def stager(directory):
        threads.append(threading.get_ident())

        def finish():
            assert may_write.wait(20)
            threads.append(threading.get_ident())
            writer(directory)

        return finish

    saver = staged(tmp_path, stager)
    assert saver.maybe_save(1)
    assert saver.last_good is None
    may_write.set()
    assert saver.wait(20)
    assert "model.bin" in verify_checkpoint(saver.last_good.path).names()
    assert threads[0] == threading.get_ident() != threads[1]


def test_without_a_stager_only_what_comes_behind_is_left_for_later(tmp_path):
    """Checksums, sync and commit; the framework writes while the training waits."""
    saver = staged(tmp_path, None)
    assert saver.maybe_save(1)
    assert saver.wait(20)
    assert verify_checkpoint(saver.last_good.path).step == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_failure_in_either_part_is_no_checkpoint(tmp_path, capfd, is_late):
    """It is said, and training goes on."""

    def fail():
        raise OSError(28, "No space left on device")

    saver = staged(tmp_path, lambda _directory: fail if is_late else fail())
    saver.maybe_save(1)
    assert saver.wait(20)
    assert saver.last_good is None
    assert "No space left" in capfd.readouterr().err


def test_a_save_into_memory_is_moved_and_leaves_nothing_there(tmp_path):
    """From the second one on, when it is known how much room it takes."""
    memory, places = tmp_path / "memory", []
    memory.mkdir()

    def write(directory):
        places.append(directory)
        writer(directory)

    saver = staged(tmp_path / "run", MemoryStaging(write, memory), write)
    for step in (1, 2):
        assert saver.maybe_save(step)
        assert saver.wait(20)
        names = verify_checkpoint(saver.last_good.path).names()
        assert {"model.bin", f"{SHARDED}/meta.pt", "optimizer_0/.metadata"} <= names
    assert [place.parent == memory for place in places] == [False, True]
    assert list(memory.iterdir()) == []


def test_what_a_killed_process_has_left_in_memory_is_removed(tmp_path):
    """Of this user and this namespace of processes, and of nobody that may still be there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    mine = _own_name()
    namespace = mine.split("-")[0]
    kept = [f"resilience-save-{name}" for name in (f"{mine}-abc", f"7{namespace}-{gone.pid}-1-abc")]
    for name in (*kept, f"resilience-save-{namespace}-{gone.pid}-1-abc"):
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
