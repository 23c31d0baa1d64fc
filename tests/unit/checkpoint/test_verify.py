from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience_sdk.checkpoint.commit import begin, commit, discard, find_trust_fault, write_file
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError, Manifest
from resilience_sdk.checkpoint.store import CheckpointStore, verify_checkpoint

SLOW_FIXTURE = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
CONTENT = {"state.pt": bytes(range(256)) * 3, "values.json": b"{}", "rank-00000.json": b'{"rng": 1}'}


def put(checkpoints, step):
    unfinished = begin(checkpoints, step, "t0")
    entries = [
        write_file(unfinished, name, lambda writer, data=data: writer.write(data)) for name, data in CONTENT.items()
    ]
    return commit(unfinished, Manifest(step, 1, tuple(entries)), "t0")


@pytest.fixture
def store(tmp_path):
    """Two good checkpoints, of steps 10 and 20."""
    place = tmp_path / "checkpoints"
    place.mkdir(mode=0o700)
    put(place, 10)
    put(place, 20)
    return CheckpointStore(place, keep=2, group_readable=False)


@SLOW_FIXTURE
@given(data=st.data())
def test_a_file_torn_at_any_byte_is_found(store, data):
    """Cut, zeroed to the end, changed in one byte, or gone: the damaged checkpoint is skipped for the one before."""
    victim = store.path_of(20)
    keep = {path.name: path.read_bytes() for path in victim.iterdir()}
    name = data.draw(st.sampled_from(sorted(keep)))
    content = keep[name]
    place = data.draw(st.integers(0, len(content) - 2))
    damage = data.draw(st.sampled_from(["cut", "zeroed", "changed", "gone", "longer"]))
    damaged = {
        "cut": content[:place],
        "zeroed": content[:place] + bytes(len(content) - place),
        "changed": content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :],
        "longer": content + b"x",
        "gone": b"",
    }[damage]
    try:
        if damage == "gone":
            (victim / name).unlink()
        else:
            (victim / name).write_bytes(damaged)
        selection = store.find_newest()
    finally:
        (victim / name).write_bytes(content)
        (victim / name).chmod(0o600)
    if damaged == content:
        assert selection.name == "step-00000020"
        return
    assert selection.name == "step-00000010"
    assert [skipped.name for skipped in selection.skipped] == ["step-00000020"]


def test_no_truncation_and_no_flipped_bit_is_ever_loaded(store):
    """Every prefix of every file, one bit of every byte of every file: each time the checkpoint is refused."""
    victim = store.path_of(20)
    flaws = 0
    for path in sorted(victim.iterdir()):
        content = path.read_bytes()
        is_manifest = path.name == "manifest.json"
        damages = [content[:end] for end in range(len(content) - is_manifest)]  # but for its last line feed
        damages += [
            content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
            for place in range(len(content) - is_manifest)
        ]
        for damaged in damages:
            path.write_bytes(damaged)
            try:
                verify_checkpoint(victim)
            except InvalidCheckpointError as error:
                flaws += bool(error.reason)
            else:
                pytest.fail(f"{path.name} was taken for whole")
        path.unlink()
        with pytest.raises(InvalidCheckpointError, match=f"{path.name} is missing"):
            verify_checkpoint(victim)
        path.write_bytes(content)
        path.chmod(0o600)
    assert flaws > 2000
    assert verify_checkpoint(victim).step == 20


def test_no_manifest_no_checkpoint(store):
    """A directory without its manifest is skipped, however complete the rest is."""
    (store.path_of(20) / "manifest.json").unlink()
    selection = store.find_newest()
    assert selection.name == "step-00000010"
    assert selection.skipped[0].why == "manifest.json is missing"


@pytest.mark.parametrize("target", ["state.pt", "manifest.json", "."])
@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_what_others_can_write_is_refused_with_the_cure(store, target, mode):
    """A group or world write bit on a file or on the directory means that it is not loaded."""
    path = store.path_of(20) / target
    path.chmod(mode | 0o100)
    selection = store.find_newest()
    assert selection.name == "step-00000010"
    assert selection.skipped[0].untrusted
    assert "chmod -R go-w" in selection.skipped[0].why


def test_a_place_that_others_can_write_is_refused(store):
    """Nothing below a `checkpoints` directory with a group write bit is loaded."""
    store.directory.chmod(0o770)
    assert store.find_newest().name is None


def test_a_foreign_owner_is_refused_with_the_cure(store):
    """Files of neither this user nor root are refused."""
    status = (store.path_of(20) / "state.pt").stat()
    path = store.path_of(20)
    assert find_trust_fault(status, path, status.st_uid) is None
    as_root = os.stat_result((status.st_mode, *status[1:4], 0, *status[5:]))
    assert find_trust_fault(as_root, path, 4321) is None
    foreign = os.stat_result((status.st_mode, *status[1:4], 1234, *status[5:]))
    assert "cp -r" in find_trust_fault(foreign, path, 4321)


def test_links_and_pipes_are_not_followed(store):
    """A symbolic link or a pipe in place of a file is no file of a checkpoint, and does not block the reader."""
    for step, make in (
        (20, lambda path: path.symlink_to("/etc/passwd")),
        (10, lambda path: os.mkfifo(path, 0o600)),
    ):
        path = store.path_of(step) / "manifest.json"
        path.unlink()
        make(path)
        with pytest.raises(InvalidCheckpointError):
            verify_checkpoint(store.path_of(step))


def test_leftovers_are_cleaned_and_an_interrupted_replacement_is_undone(store):
    """What killed writers left is removed; a checkpoint that had stepped aside gets its name back."""
    place = store.directory
    shutil.copytree(store.path_of(10), place / ".tmp-step-00000030-aa")
    shutil.copytree(store.path_of(10), place / ".del-step-00000005-aa")
    shutil.copytree(store.path_of(10), place / ".old-step-00000010-aa")
    store.path_of(20).rename(place / ".old-step-00000020-bb")
    assert store.find_newest().name == "step-00000020"
    assert sorted(path.name for path in place.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_commit_replaces_a_damaged_one_of_the_same_step(store):
    """A step whose checkpoint was damaged can be saved again."""
    (store.path_of(20) / "state.pt").write_bytes(b"")
    assert store.find_newest().name == "step-00000010"
    put(store.directory, 20)
    assert store.find_newest().name == "step-00000020"
    assert len(list(store.directory.iterdir())) == 2


def test_a_failed_save_is_gone_at_once_whoever_still_writes(tmp_path):
    """Its name is gone though a file is open in it, and a late file of another rank finds no place."""
    unfinished = begin(tmp_path, 3, "t0")
    with (unfinished / "state.pt").open("w"):
        discard(unfinished)
        with pytest.raises(FileNotFoundError):
            (unfinished / "late").write_text("")
    assert list(tmp_path.iterdir()) == []
    discard(unfinished)
