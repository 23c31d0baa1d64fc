"""The script's own saves with Accelerate: whole or not at all, and no rank waits for one that cannot come."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import types
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.adapters.accelerate import saves
from resilience_sdk.adapters.accelerate.attached import Attached
from resilience_sdk.adapters.accelerate.saves import (
    FILE,
    UNFINISHED,
    StateSaves,
    newest,
    number_of,
    read_file,
    to_remove,
)
from resilience_sdk.core import console, resume_limits
from resilience_sdk.errors import CheckpointError


class Saving:
    """An accelerator of two ranks that writes as Accelerate does: the main process the model, each rank a file."""

    distributed_type = "MULTI_CPU"
    num_processes = 2
    project_dir = None

    def __init__(self, rank):
        self.process_index = rank
        self.is_main_process = self.is_local_main_process = rank == 0
        self.project_configuration = types.SimpleNamespace(
            automatic_checkpoint_naming=False, iteration=0, save_on_each_node=False, total_limit=None
        )

    @property
    def save_iteration(self):
        return self.project_configuration.iteration

    def save_state(self, output_dir, **_options):
        if self.is_main_process:
            open(os.path.join(output_dir, "model"), "w").close()
        open(os.path.join(output_dir, f"random_{self.process_index}"), "w").close()

    def load_state(self, *_args): ...


class Handle:
    """What of the handle the saves ask; `states` are those that load what is to be loaded."""

    states = None

    def describe(self):
        return {"step": 3}

    def describe_own(self):
        return {}

    def load(self, place, _saved):
        self.states.load(place)


@pytest.fixture
def saving_of(monkeypatch):
    """Return what makes the saves of a rank, which may wait for nobody."""
    monkeypatch.setattr(saves, "find_ranks", lambda: pytest.fail("it waits for the other rank"))

    def saving_of(rank):
        accelerator = Saving(rank)
        return StateSaves(accelerator, Handle())

    return saving_of


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


WHOLE = ["model", "random_0", FILE]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("before", ["nothing", "an empty one", "an older save"])
def test_other_ranks_add_what_is_theirs(saving_of, tmp_path, order, before):
    """Whoever comes first; until the main process has saved, it is not whole."""
    target = tmp_path / "a"
    if before != "nothing":
        target.mkdir()
    if before == "an older save":
        (target / "model").write_text("old")
    first, second = order
    saving_of(first).save_state(target)
    assert (target / UNFINISHED).exists() is (first == 1 and before != "an older save")
    saving_of(second).save_state(target)
    assert names_in(target) == ["model", "random_0", "random_1", FILE]
    assert (target / "model").read_text() == ""
    assert names_in(tmp_path) == ["a"]


@pytest.fixture
def places(monkeypatch):
    """The directories that are written into."""
    found, write = [], StateSaves.write
    monkeypatch.setattr(StateSaves, "write", lambda *args, **options: found.append(args[1]) or write(*args, **options))
    return found


def test_a_directory_that_is_a_mount_is_saved_into(saving_of, tmp_path, monkeypatch, places):
    """What is beside it is another file system, from which nothing can be renamed."""
    target = tmp_path / "a"
    target.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == target)
    saving_of(0).save_state(target)
    assert [place.parent for place in places] == [target]
    assert names_in(target) == WHOLE


@pytest.fixture(params=["a disk", "a part of the same disk"])
def mounted(request, tmp_path):
    """Return a directory where something is mounted; that takes the rights of root."""
    place, part = tmp_path / "there" / "a", tmp_path / "part"
    place.mkdir(parents=True)
    part.mkdir()
    what = ["-t", "tmpfs", "none"] if request.param == "a disk" else ["--bind", part]
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, *what, place], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1), (1, 0, 1, 0)])
def test_all_ranks_save_into_a_mount(saving_of, mounted, order):
    """Nothing can take its place, and another name beside it is another file system."""
    for rank in order:
        saving_of(rank).save_state(mounted)
    assert names_in(mounted) == ["model", "random_0", "random_1", FILE]
    assert names_in(mounted.parent) == ["a"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_directories_is_saved_to(saving_of, tmp_path, monkeypatch, number):
    """There is nothing more to do there; files are synced all the same."""
    plain, synced = os.fsync, []

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saving_of(0).save_state(tmp_path / "a")
    assert names_in(tmp_path / "a") == sorted(synced) == WHOLE


@pytest.fixture
def numbered(monkeypatch, tmp_path):
    """Return the numbered saves of the first of two ranks; `numbered.errors`: what the other one tells, in turn."""
    accelerator = Saving(0)
    accelerator.project_dir = str(tmp_path)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.loaded = []
    accelerator.errors = []
    accelerator.load_state = accelerator.loaded.append

    class Told:
        rank, size = 0, 2

        def gather(self, mine):
            return [mine, accelerator.errors.pop(0) if accelerator.errors else None]

        def broadcast(self, message):
            return message

    monkeypatch.setattr(saves, "find_ranks", Told)
    handle = Handle()
    handle.states = StateSaves(accelerator, handle)
    accelerator.save_state, accelerator.load_state = handle.states.save_state, handle.states.load_state
    return accelerator


def test_a_rank_that_cannot_read_keeps_all_from_loading(numbered, tmp_path):
    """What is loaded is sharded, so the others would wait in it."""
    numbered.distributed_type = "FSDP"
    numbered.save_state()
    for errors in ([["no access", None]], [None, ["no access", None]]):
        numbered.errors = errors
        with pytest.raises(CheckpointError, match="rank 1: no access"):
            numbered.load_state()
    assert numbered.loaded == []
    numbered.load_state()
    assert numbered.loaded == [str(tmp_path / "checkpoints" / "checkpoint_0")]


def test_the_other_ranks_hear_of_a_directory_that_the_first_cannot_list(numbered, tmp_path):
    """They would wait for the name of the newest one, where all have to load."""
    numbered.distributed_type = "FSDP"
    told = []
    numbered.errors = types.SimpleNamespace(pop=lambda _: told.append(1))
    (tmp_path / "checkpoints").mkdir()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="rank 0: Permission denied"):
        patch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied", path)))
        numbered.load_state()
    assert told == [1]


def test_one_rank_may_load_alone_where_nothing_is_sharded(numbered, tmp_path, monkeypatch):
    """Such as the best one for an evaluation, while the others wait or train."""
    numbered.save_state()
    newest = tmp_path / "checkpoints" / "checkpoint_0"
    with monkeypatch.context() as patch:
        patch.setattr(saves, "find_ranks", lambda: pytest.fail("it waits for the other rank"))
        numbered.load_state()
        numbered.load_state(newest)
    assert numbered.loaded == [str(newest)] * 2


def test_a_rank_that_has_loaded_alone_saves_where_the_first_one_does(numbered, tmp_path, monkeypatch):
    """Its own count goes on behind what it has loaded."""
    ranks = saves.find_ranks()
    ranks.broadcast = lambda _: 0
    monkeypatch.setattr(saves, "find_ranks", lambda: ranks)
    numbered.project_configuration.iteration = 7
    assert numbered.save_state() == tmp_path / "checkpoints" / "checkpoint_0"
    assert numbered.project_configuration.iteration == 1


def test_numbered_directories_on_a_disk_of_their_own_are_written_there(numbered, tmp_path, places):
    """From another file system nothing can be renamed."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with TemporaryDirectory(dir=other) as disk:
        (tmp_path / "checkpoints").symlink_to(disk)
        numbered.save_state()
        assert [place.parent for place in places] == [tmp_path / "checkpoints"]
        assert names_in(Path(disk)) == ["checkpoint_0"]
        assert names_in(Path(disk, "checkpoint_0")) == WHOLE


@pytest.mark.parametrize("has_target", [False, True])
def test_a_border_that_looks_like_none_is_copied_over(saving_of, tmp_path, monkeypatch, has_target):
    """A part of a disk can be mounted in the same disk."""
    target = tmp_path / "there" / "a"
    (target if has_target else target.parent).mkdir(parents=True)
    plain = Path.rename

    def rename(path, place):
        if (target if has_target else target.parent) in {*path.parents} ^ {*Path(place).parents}:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return plain(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(saves, "place_beside", lambda *_, **__: tmp_path)
    saving_of(0).save_state(target)
    assert names_in(target) == WHOLE
    assert names_in(tmp_path) == ["there"]
    assert names_in(target.parent) == ["a"]


def test_no_directory_is_an_error(saving_of):
    """It would be the one that the script was started in."""
    with pytest.raises(CheckpointError, match="name the directory"):
        saving_of(0).save_state()


# -- numbered directories


@given(st.lists(st.integers(0, 200), unique=True), st.one_of(st.none(), st.integers(0, 5)))
def test_the_newest_are_kept(numbers, limit):
    """By their numbers, as many as the limit says, never none; nothing that is not numbered is removed."""
    names = [*(f"checkpoint_{number}" for number in numbers), "best", "checkpoint_last"]
    removed = to_remove(names, limit)
    kept = sorted(set(numbers) - {number_of(name) for name in removed})
    assert kept == (sorted(numbers) if limit is None else sorted(numbers)[-max(limit, 1) :])


def test_a_half_written_one_is_passed_over(tmp_path, capsys):
    """And it is said which."""
    for number in (9, 10):
        (tmp_path / f"checkpoint_{number}").mkdir()
    assert newest(tmp_path) == "checkpoint_10"
    (tmp_path / "checkpoint_10" / UNFINISHED).touch()
    assert newest(tmp_path) == "checkpoint_9"
    assert "checkpoint_10 is half written" in capsys.readouterr().err
    assert newest(tmp_path / "none") is None


# -- the file of ours


@pytest.mark.parametrize("text", ["", "{", "[]", '{"v": 2, "step": 1}', '{"v": 1, "step": "x"}'])
def test_a_damaged_one_is_an_error_with_a_cure(tmp_path, text):
    """It is not taken for a run without us, which has none: the place would be lost without a word."""
    assert read_file(tmp_path) is None
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="remove it"):
        read_file(tmp_path)


ALONE = "accelerator.save_state() was called on the main process alone"


@pytest.mark.parametrize(
    ("kept", "rank", "is_said"),
    [
        ((0, 1, 2, 3), 0, False),
        ((0,), 0, True),
        ((0, 1), 0, False),  # the other node has a disk of its own
        ((2, 3), 2, False),  # and this is that
        ((0,), 2, True),  # one disk for all
        ((0, 1), 2, True),
        ((0,), 1, False),  # the first rank of each node says it
        ((), 0, False),  # of an older version
    ],
)
def test_what_each_rank_has_of_its_own_is_missed_on_its_own_disk_only(
    tmp_path, monkeypatch, capsys, kept, rank, is_said
):
    """Two nodes of two ranks: a disk of a node has the files of its ranks, and that is right."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    monkeypatch.setattr(console, "_said", set())
    accelerator = Saving(rank)
    accelerator.num_processes, accelerator.local_process_index = 4, rank % 2
    accelerator.is_local_main_process = rank % 2 == 0
    for one in kept:
        own = {"v": 1, "ranks": 4, "held": {"model.rng": 1}, "position": None}
        (tmp_path / saves._file_of(one)).write_text(json.dumps(own))
    handle = types.SimpleNamespace(_accelerator=accelerator, _state=StateSaves(accelerator, Handle()))
    Attached._note_missing(handle, tmp_path)
    assert (ALONE in capsys.readouterr().err) is is_said
