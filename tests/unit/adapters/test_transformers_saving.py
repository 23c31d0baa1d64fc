"""Checkpoints of a Trainer: which are complete, resumed, deleted; saves of all ranks; a step that is saved twice."""

import contextlib
import json
import os
import shutil
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.adapters.transformers import last_checkpoint, saving
from resilience_sdk.adapters.transformers.saving import (
    MARK,
    NOT_ENDED,
    checked,
    find_deletable,
    find_fault,
    put_all_back,
    put_back_on_all_ranks,
    rotate,
)
from resilience_sdk.checkpoint import Checkpointer, whole_directory
from resilience_sdk.errors import CheckpointError, NotSavedError
from tests.integration import forked


def made(output_dir, step=5, *, sealed=True, at=None):
    """Make a checkpoint as a save does; `at`: when, in seconds."""
    path = output_dir / f"checkpoint-{step}"
    saving.begin(path)
    (path / "state").write_bytes(b"first")
    (path / "shards").mkdir()
    (path / "shards" / "0.distcp").write_bytes(b"123")
    if sealed:
        saving.seal(path, step, 2)
    if at is not None:
        os.utime(path, (at, at))
    return path


# -- which are complete


def test_a_save_is_incomplete_until_it_is_sealed(tmp_path):
    """Whatever was written so far; also when a step is saved again, whose files may be half overwritten."""
    path = made(tmp_path, sealed=False)
    for _ in range(2):
        assert find_fault(path) == NOT_ENDED
        saving.seal(path, 5, 2)
        assert find_fault(path) is None
        assert json.loads((path / MARK).read_bytes())["files"] == {"state": 5, "shards/0.distcp": 3}
        saving.begin(path)


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda path: (path / "state").unlink(), "state is missing"),
        (lambda path: (path / "shards" / "0.distcp").write_bytes(b"1"), "shards/0.distcp has 1 bytes instead of 3"),
        (lambda path: (path / MARK).write_text("{"), f"{MARK} cannot be read"),
        (lambda path: (path / MARK).write_text("[]"), NOT_ENDED),
        (lambda path: (path / "checkpoint-is-incomplete.txt").touch(), NOT_ENDED),
    ],
)
def test_a_damaged_one_says_what_is_wrong_and_is_refused(tmp_path, harm, fault):
    """Also one that Transformers itself marks as incomplete."""
    path = made(tmp_path)
    harm(path)
    assert find_fault(path).startswith(fault)
    with pytest.raises(CheckpointError, match=fault):
        checked(str(path), str(tmp_path), "other")


def test_two_ranks_with_the_same_process_number_do_not_meet(tmp_path, monkeypatch):
    """As in containers on two nodes, whose processes have the same numbers; the mark is whole all the time."""
    sync, others = saving.sync_file, [True]

    def sync_when_the_other_rank_has_come_through(path):
        if others:
            others.pop()
            saving.begin(tmp_path)
        return sync(path)

    monkeypatch.setattr(saving, "sync_file", sync_when_the_other_rank_has_come_through)
    saving.begin(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [MARK]
    assert others == []


# -- which are resumed


def test_the_newest_complete_one_is_the_last(tmp_path, capsys):
    """By its step as a number; nothing is said where nothing is passed over."""
    made(tmp_path, 9)
    newest = made(tmp_path, 10)
    assert last_checkpoint(tmp_path) == checked(True, str(tmp_path), None) == str(newest)
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
    """Nor where there is no directory yet. Who asks for one is told what to write where that is to be a fresh start."""
    assert last_checkpoint(tmp_path / "none") is None
    made(tmp_path, 7, sealed=False)
    assert last_checkpoint(tmp_path) is None
    assert "no checkpoint is resumed" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"no complete checkpoint; .*last_checkpoint\("):
        checked(True, str(tmp_path), None)


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path):
    """To start over there would be wrong."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be read"):
        last_checkpoint(tmp_path / "file")


def test_what_is_asked_for_goes_before_what_the_run_directory_has(tmp_path):
    """One that was saved without the SDK too: who names it knows it."""
    (tmp_path / "checkpoint-9").mkdir()
    assert checked(str(tmp_path / "checkpoint-9"), str(tmp_path), "other") == str(tmp_path / "checkpoint-9")
    for asked in (None, False):
        assert checked(asked, str(tmp_path), "found") == "found"
        assert checked(asked, str(tmp_path), None) is None


# -- which are deleted

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


def test_what_only_a_stop_has_saved_goes_first():
    """So that those are left that a training has which never stopped."""
    names = ["checkpoint-3", "checkpoint-6", "checkpoint-7", "checkpoint-9"]
    assert find_deletable(names, names, None, 2, {"checkpoint-7"}) == ["checkpoint-7", "checkpoint-3"]
    assert find_deletable(names[:3], names[:3], None, 1, {"checkpoint-7"}) == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.parametrize(("limit", "left"), [(None, 3), (0, 3), (1, 1)])
def test_the_last_good_one_is_the_newest_by_time(tmp_path, limit, left):
    """Another training may have left higher numbers there. Without a limit all stay, as with the trainer."""
    made(tmp_path, 900, at=1000)
    made(tmp_path, 5, at=2000)
    made(tmp_path, 6, sealed=False, at=3000)
    rotate(tmp_path, None, limit)
    assert len(list(tmp_path.iterdir())) == left
    assert (tmp_path / "checkpoint-5").exists()


# -- several ranks save


class Told:
    """Two ranks, of which the other one tells these errors, one after the other; then none."""

    rank, size = 0, 2

    def __init__(self, *errors):
        self.errors = list(errors)

    def gather(self, mine):
        return [mine, self.errors.pop(0) if self.errors else None]


class Trainer:
    """What of a trainer a save needs; it notes how often it has saved."""

    def __init__(self, output_dir):
        self.args = types.SimpleNamespace(should_save=True, save_total_limit=None)
        self.state = types.SimpleNamespace(global_step=5, best_model_checkpoint=None)
        self.control = types.SimpleNamespace(should_training_stop=False)
        self.output_dir = output_dir
        self.saves = 0

    def _get_output_dir(self, trial):
        return str(self.output_dir)

    def _save_checkpoint(self, model, trial):
        self.saves += 1
        self.save_model()

    def save_model(self):
        (self.output_dir / "checkpoint-5" / "state").write_text(
            f"save {len(list(self.output_dir.rglob('state')))} of {self.args.save_total_limit}"
        )


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Save beside a rank that tells these errors; return whether that worked, and how often the trainer saved."""

    def save(*errors, trainer=None):
        ranks, trainer = Told(*errors), trainer or Trainer(tmp_path)
        monkeypatch.setattr(saving, "find_ranks", lambda: ranks)
        saves = saving.TrainerSaves(trainer, types.SimpleNamespace(settings=None), is_known=False)
        return saves.save("model", trial=None), trainer.saves

    return save


def contents(output_dir):
    return [path.name for path in output_dir.iterdir()], (output_dir / "checkpoint-5" / "state").read_text()


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("reached", range(3))
def test_a_rank_that_fails_keeps_all_from_saving_or_leaves_what_was_there(save, tmp_path, capsys, reached, is_second):
    """The trainer's save may be collective, so others would wait in it. A first save of a step may be the only one."""
    if is_second:
        assert save() == (True, 1)
    assert save(*[None] * reached, ["no space", None]) == (False, reached == 2)
    assert "rank 1: no space" in capsys.readouterr().err
    if is_second:
        assert find_fault(tmp_path / "checkpoint-5") is None
        assert contents(tmp_path) == (["checkpoint-5"], "save 0 of None")
    else:
        assert not (tmp_path / "checkpoint-5").exists()


def test_a_model_that_cannot_be_written_is_an_error_behind_the_save(save, tmp_path, capsys):
    """Only some ranks write it, and all may meet in a barrier after it. The trainer has its own method again."""

    class Full(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            self.saves += 1  # is reached

        def save_model(self):
            raise OSError(28, "No space left on device")

    trainer = Full(tmp_path)
    before = {**vars(trainer), "saves": 2}
    assert save(trainer=trainer) == (False, 2)
    assert "No space left" in capsys.readouterr().err
    assert vars(trainer) == before


# -- a step that is saved again


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_last_save_that_fails_is_an_error_but_at_an_agreed_stop(tmp_path, monkeypatch, is_stopping):
    """A stop leaves with 75, saved or not, also where it comes at the very last step."""

    class Full(Trainer):
        def save_model(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setenv("RESILIENCE_WAIT_LIMIT", "0")
    trainer = Full(tmp_path / "trained")
    trainer.output_dir.mkdir()
    trainer.state.max_steps = trainer.state.global_step
    saves = saving.TrainerSaves(trainer, types.SimpleNamespace(settings=None), is_known=False)
    saves._checkpointer = Checkpointer({}, run_dir=tmp_path / "run", writer=saves._write)
    saves.is_stopping = is_stopping
    with contextlib.nullcontext() if is_stopping else pytest.raises(NotSavedError):
        assert not saves.save("model", trial=None)
    assert trainer.control.should_training_stop is is_stopping


def test_a_second_save_takes_the_place_of_the_first(save, tmp_path):
    """And nothing else is left."""
    save()
    assert save() == (True, 1)
    assert contents(tmp_path) == (["checkpoint-5"], "save 1 of None")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_second_save_that_is_killed_leaves_the_first_one(tmp_path, has_begun):
    """It is found where it is; the training that goes on gives it its name back, on the rank that saves."""
    path = killed_in_second_save(tmp_path, has_begun=has_begun)
    found = last_checkpoint(tmp_path)
    assert find_fault(saving.place_of(path)) is None
    assert [saving.step_of(one) for one in saving.checkpoints_in(tmp_path).values()] == [5] * has_begun
    put_back_on_all_ranks(str(tmp_path), is_keeper=False)
    assert saving.aside_of(path).exists()
    put_back_on_all_ranks(str(tmp_path), is_keeper=True)
    assert checked(found, str(tmp_path), None) == str(path) == last_checkpoint(tmp_path)
    assert is_as_the_first_save_left_it(tmp_path)


def test_what_is_aside_goes_where_the_second_save_is_whole(tmp_path):
    """Its writer was killed before it could remove it."""
    path = made(tmp_path)
    shutil.copytree(path, saving.aside_of(path))
    put_all_back(tmp_path)
    assert is_as_the_first_save_left_it(tmp_path)


# -- several ranks put back at once what the killed second save of a step has left: the first save is never lost

ROUNDS = 60
RANKS = 3


def killed_in_second_save(output_dir, *, has_begun=True):
    """Make what such a save leaves."""
    path = made(output_dir)
    saving.set_aside(path)
    if has_begun:
        saving.begin(path)
        (path / "state").write_text("second, not whole")
        (path / "shard").write_text("of it")
    return path


def is_as_the_first_save_left_it(output_dir):
    return contents(output_dir) == (["checkpoint-5"], "first") and find_fault(output_dir / "checkpoint-5") is None


class Steps:
    """Runs something in the place where a rank is about to do its n-th thing to the directory."""

    def __init__(self, monkeypatch, at, other):
        self.left, self.other, self.is_inside = at, other, False
        rename, remove = Path.rename, whole_directory.remove_tree
        monkeypatch.setattr(Path, "rename", lambda *args: self.pass_by() or rename(*args))
        monkeypatch.setattr(whole_directory, "remove_tree", lambda *args: self.pass_by() or remove(*args))

    def pass_by(self):
        if self.is_inside:
            return
        self.left -= 1
        if self.left == 0:
            self.is_inside = True
            self.other()
            self.is_inside = False


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("at", range(1, 5))
def test_another_rank_comes_through_at_any_step(tmp_path, monkeypatch, at, has_begun):
    """It has looked at the directory before or behind any change of the first one, and makes all of its own."""
    killed_in_second_save(tmp_path, has_begun=has_begun)
    with monkeypatch.context() as patched:
        Steps(patched, at, lambda: put_all_back(tmp_path))
        put_all_back(tmp_path)
    put_all_back(tmp_path)  # a tree that the second one was the last to take away may be left: the next start has it
    assert is_as_the_first_save_left_it(tmp_path)


@pytest.mark.parametrize("at", range(1, 5))
def test_a_rank_that_is_killed_at_any_step_loses_nothing(tmp_path, monkeypatch, at):
    """The next start finds it, wherever it is."""

    def killed():
        raise KeyboardInterrupt

    path = killed_in_second_save(tmp_path)
    with monkeypatch.context() as patched:
        Steps(patched, at, killed)
        try:
            put_all_back(tmp_path)
        except KeyboardInterrupt:
            assert find_fault(saving.place_of(path)) is None
    put_all_back(tmp_path)
    assert is_as_the_first_save_left_it(tmp_path)


def test_ranks_that_race_lose_nothing(tmp_path):
    """In processes, many times; each round is let go by one write."""
    for number in range(ROUNDS):
        killed_in_second_save(tmp_path / str(number))

    def race(begun, told):
        for number in range(ROUNDS):
            os.write(told, b".")
            os.read(begun, 1)
            with contextlib.suppress(OSError):  # as the start of a training does
                put_all_back(tmp_path / str(number))

    told_read, told_write = os.pipe()
    begins = [os.pipe() for _ in range(RANKS)]
    pids = [forked.start(lambda begun=begun: race(begun, told_write)) for begun, _ in begins]
    os.close(told_write)
    for _ in range(ROUNDS):
        ready = 0
        while ready < RANKS:
            more = len(os.read(told_read, RANKS - ready))
            assert more, "a rank has ended"
            ready += more
        for _, begin in begins:
            os.write(begin, b".")
    assert forked.wait(pids) == [0] * RANKS
    for descriptor in (told_read, *sum(begins, ())):
        os.close(descriptor)
    places = [saving.place_of(tmp_path / str(number) / "checkpoint-5") for number in range(ROUNDS)]
    assert [one for one in places if find_fault(one) is not None or (one / "state").read_text() != "first"] == []
