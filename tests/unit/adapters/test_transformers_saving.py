"""How the ranks of a Trainer save together: what is collective is left out on all ranks where one cannot begin."""

import types

import pytest

from resilience_sdk.adapters.transformers import marks, saving


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
        return saves.save(lambda: called.append(1)), len(called)

    return save


def test_a_rank_that_cannot_begin_keeps_all_from_saving(save, tmp_path, capsys):
    """The trainer's save may be collective, so the others would wait in it."""
    assert save("no space") == (False, 0)
    assert "rank 1: no space" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint-5").exists()


def test_a_rank_that_fails_to_write_leaves_no_checkpoint(save, tmp_path):
    """It is known to all."""
    assert save(None, "no space") == (False, 1)
    assert not (tmp_path / "checkpoint-5").exists()


def test_without_an_error_it_is_complete(save, tmp_path):
    """And marked so."""
    assert save() == (True, 1)
    assert marks.examine(tmp_path / "checkpoint-5").fault is None
