"""How the ranks of a Trainer save together: what is collective is left out on all ranks where one cannot begin."""

import shutil
import types

import pytest

from resilience_sdk.adapters.transformers import again, last_checkpoint, marks, saving
from resilience_sdk.adapters.transformers.resuming import checked, put_back


class Told:
    """Two ranks, of which the other one tells these errors, one after the other; then none."""

    rank, size = 0, 2

    def __init__(self, *errors):
        self.errors = list(errors)

    def gather(self, mine):
        return [mine, self.errors.pop(0) if self.errors else None]


class Trainer:
    """What of a trainer a save needs."""

    def __init__(self, output_dir):
        self.args = types.SimpleNamespace(should_save=True, save_total_limit=None)
        self.state = types.SimpleNamespace(global_step=5, best_model_checkpoint=None)
        self.output_dir = output_dir

    def _get_output_dir(self, trial):
        return str(self.output_dir)

    def save_model(self): ...


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Save beside a rank that tells these errors; return whether that worked, and how often the trainer saved."""

    def save(*errors):
        ranks, called = Told(*errors), []
        monkeypatch.setattr(saving, "find_ranks", lambda: ranks)
        session = types.SimpleNamespace(settings=None)
        saves = saving.Saves(Trainer(tmp_path), session, is_known=False)
        return saves.save(lambda: write(called)), len(called)

    def write(called):
        called.append(1)
        (tmp_path / "checkpoint-5" / "state").write_text(f"save {len(list(tmp_path.rglob('state')))}")

    return save


def test_a_rank_that_cannot_begin_keeps_all_from_saving(save, tmp_path, capsys):
    """The trainer's save may be collective, so the others would wait in it."""
    assert save("no space") == (False, 0)
    assert "rank 1: no space" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint-5").exists()


def test_a_rank_that_fails_to_write_leaves_no_checkpoint(save, tmp_path):
    """It is known to all."""
    assert save(None, None, "no space") == (False, 1)
    assert not (tmp_path / "checkpoint-5").exists()


def test_without_an_error_it_is_complete(save, tmp_path):
    """And marked so."""
    assert save() == (True, 1)
    assert marks.examine(tmp_path / "checkpoint-5").fault is None


# -- a step that is saved again


def contents(output_dir):
    return [path.name for path in output_dir.iterdir()], (output_dir / "checkpoint-5" / "state").read_text()


@pytest.mark.parametrize("errors", [("no space",), (None, "no space"), (None, None, "no space")])
def test_a_second_save_that_fails_leaves_the_first_one(save, tmp_path, errors):
    """It is complete, and may be the only one."""
    assert save() == (True, 1)
    assert not save(*errors)[0]
    assert marks.examine(tmp_path / "checkpoint-5").fault is None
    assert contents(tmp_path) == (["checkpoint-5"], "save 0")


def test_a_second_save_takes_the_place_of_the_first(save, tmp_path):
    """And nothing else is left."""
    save()
    assert save() == (True, 1)
    assert contents(tmp_path) == (["checkpoint-5"], "save 1")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_second_save_that_is_killed_leaves_the_first_one(save, tmp_path, has_begun):
    """It is found where it is; the training that goes on gives it its name back."""
    save()
    path = tmp_path / "checkpoint-5"
    again.set_aside(path)
    if has_begun:
        marks.begin(path)
    found = last_checkpoint(tmp_path)
    assert marks.examine(again.place_of(path)).fault is None
    assert [marks.step_of(one) for one in marks.checkpoints_in(tmp_path).values()] == [5] * has_begun
    put_back(str(tmp_path), is_keeper=True)
    assert checked(found, str(tmp_path), None) == str(path) == last_checkpoint(tmp_path)
    assert contents(tmp_path) == (["checkpoint-5"], "save 0")


def test_what_is_aside_goes_where_the_second_save_is_whole(save, tmp_path):
    """Its writer was killed before it could remove it."""
    save()
    shutil.copytree(tmp_path / "checkpoint-5", tmp_path / ".checkpoint-5.before")
    put_back(str(tmp_path), is_keeper=True)
    assert contents(tmp_path) == (["checkpoint-5"], "save 0")


def test_a_rank_that_does_not_save_puts_nothing_back(save, tmp_path):
    """The one that saves does."""
    save()
    again.set_aside(tmp_path / "checkpoint-5")
    put_back(str(tmp_path), is_keeper=False)
    assert [path.name for path in tmp_path.iterdir()] == [".checkpoint-5.before"]
