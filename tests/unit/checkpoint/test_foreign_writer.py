"""Checkpoints with files that a framework writes by itself, and how it is told which one to load."""

import os

import pytest
import torch

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import SHARDED
from resilience_sdk.checkpoint.verify import verify_checkpoint


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
