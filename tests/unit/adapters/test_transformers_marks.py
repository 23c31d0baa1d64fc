"""Which checkpoints of a Trainer are complete, which are resumed, and which are deleted: by files alone."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.adapters.transformers import last_checkpoint, marks
from resilience_sdk.adapters.transformers.resuming import checked
from resilience_sdk.adapters.transformers.rotation import find_deletable, rotate
from resilience_sdk.errors import CheckpointError


def made(output_dir, step, *, sealed=True, at=None):
    """Make a checkpoint as a save does; `at`: when, in seconds."""
    path = output_dir / f"checkpoint-{step}"
    marks.begin(path)
    (path / "model.safetensors").write_bytes(b"12345")
    (path / "shards").mkdir()
    (path / "shards" / "0.distcp").write_bytes(b"123")
    if sealed:
        marks.seal(path, step, 2)
    if at is not None:
        os.utime(path, (at, at))
    return path


def test_a_save_is_incomplete_until_it_is_sealed(tmp_path):
    """Whatever was written so far."""
    path = made(tmp_path, 5, sealed=False)
    assert marks.examine(path).fault == marks.NOT_ENDED
    assert marks.seal(path, 5, 2) == 8
    assert marks.examine(path).fault is None


def test_a_step_that_is_saved_again_is_incomplete_until_it_is_sealed_again(tmp_path):
    """The files of the first save may be half overwritten."""
    path = made(tmp_path, 5)
    marks.begin(path)
    assert marks.examine(path).fault == marks.NOT_ENDED


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: (path / "shards" / "0.distcp").write_bytes(b"1"), "shards/0.distcp has 1 bytes instead of 3"),
        (lambda path: (path / marks.NAME).write_text("{"), f"{marks.NAME} cannot be read"),
        (lambda path: (path / marks.NAME).write_text("[]"), marks.NOT_ENDED),
        (lambda path: (path / "checkpoint-is-incomplete.txt").touch(), marks.NOT_ENDED),
    ],
)
def test_a_damaged_one_says_what_is_wrong(tmp_path, harm, fault):
    """Also one that Transformers itself marks as incomplete."""
    path = made(tmp_path, 5)
    harm(path)
    seen = marks.examine(path)
    assert seen.is_marked
    assert seen.fault.startswith(fault)


def test_a_mark_is_there_as_a_whole_or_not_at_all(tmp_path):
    """Several ranks write it at once, so each does so beside it first."""
    path = made(tmp_path, 5)
    assert json.loads((path / marks.NAME).read_bytes())["world_size"] == 2
    assert [one.name for one in path.iterdir() if one.name.startswith(marks.NAME)] == [marks.NAME]


def test_two_ranks_with_the_same_process_number_do_not_meet(tmp_path, monkeypatch):
    """As in containers on two nodes, whose processes have the same numbers."""
    sync, others = marks._synced_size, [True]

    def sync_when_the_other_rank_has_come_through(path):
        if others:
            others.pop()
            marks.begin(tmp_path)
        return sync(path)

    monkeypatch.setattr(marks, "_synced_size", sync_when_the_other_rank_has_come_through)
    marks.begin(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [marks.NAME]
    assert others == []


def test_the_newest_complete_one_is_the_last(tmp_path, capsys):
    """By its step as a number; nothing is said where nothing is passed over."""
    made(tmp_path, 9)
    newest = made(tmp_path, 10)
    assert last_checkpoint(tmp_path) == str(newest)
    assert capsys.readouterr().err == ""


def test_what_is_passed_over_is_said_in_one_line(tmp_path, capsys):
    """Each with its reason; one that was made without the SDK with how to resume it."""
    good = made(tmp_path, 5)
    made(tmp_path, 7, sealed=False)
    (tmp_path / "checkpoint-9").mkdir()
    assert last_checkpoint(str(tmp_path)) == str(good)
    [line] = capsys.readouterr().err.splitlines()
    assert "checkpoint-5 is resumed" in line
    assert "checkpoint-9: nothing says that it is complete" in line
    assert "name its path" in line
    assert "checkpoint-7: its save did not end" in line


def test_where_none_is_complete_there_is_none(tmp_path, capsys):
    """Nor where there is no directory yet."""
    assert last_checkpoint(tmp_path / "none") is None
    made(tmp_path, 7, sealed=False)
    assert last_checkpoint(tmp_path) is None
    assert "no checkpoint is resumed" in capsys.readouterr().err


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path):
    """To start over there would be wrong."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be read"):
        last_checkpoint(tmp_path / "file")


def test_true_is_the_newest_complete_one(tmp_path):
    """And not the newest one, which Transformers would load."""
    good = made(tmp_path, 5)
    made(tmp_path, 7, sealed=False)
    assert checked(True, str(tmp_path), None) == str(good)


def test_true_without_a_complete_one_is_an_error(tmp_path):
    """With what to write where that is to be a fresh start."""
    made(tmp_path, 7, sealed=False)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint; .*last_checkpoint\("):
        checked(True, str(tmp_path), None)


def test_an_incomplete_one_that_is_named_is_an_error(tmp_path):
    """One that was saved without the SDK is not: who names it knows it."""
    path = made(tmp_path, 7, sealed=False)
    with pytest.raises(CheckpointError, match="its save did not end"):
        checked(str(path), str(tmp_path), "other")
    (tmp_path / "checkpoint-9").mkdir()
    assert checked(str(tmp_path / "checkpoint-9"), str(tmp_path), "other") == str(tmp_path / "checkpoint-9")


@pytest.mark.parametrize("asked", [None, False])
def test_asked_for_nothing_it_is_what_the_run_directory_has(tmp_path, asked):
    """If it has any."""
    assert checked(asked, str(tmp_path), "found") == "found"
    assert checked(asked, str(tmp_path), None) is None


NAMES = st.lists(st.integers(0, 30).map("checkpoint-{}".format), unique=True)


@given(names=NAMES, data=st.data(), limit=st.integers(1, 5))
def test_the_limit_never_takes_the_last_good_one_or_the_best(names, data, limit):
    """And takes no more than it must, what is incomplete first."""
    complete = set(data.draw(st.lists(st.sampled_from(names)))) if names else set()
    best = data.draw(st.sampled_from([None, "elsewhere", *names]))
    doomed = find_deletable(names, complete, best, limit)
    left = [name for name in names if name not in doomed]
    assert best not in doomed
    if complete:
        assert [name for name in names if name in complete][-1] in left
    assert len(left) >= min(limit, len(names))
    assert len(left) <= max(limit, 2)
    if set(doomed) & complete:
        assert all(name in {*complete, best} for name in left)


def test_the_last_good_one_is_the_newest_by_time(tmp_path):
    """Another training may have left higher numbers there."""
    made(tmp_path, 900, at=1000)
    made(tmp_path, 5, at=2000)
    made(tmp_path, 6, sealed=False, at=3000)
    rotate(tmp_path, None, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_all_stay(tmp_path, limit):
    """As with the trainer."""
    made(tmp_path, 1)
    made(tmp_path, 2)
    rotate(tmp_path, None, limit)
    assert len(list(tmp_path.iterdir())) == 2
