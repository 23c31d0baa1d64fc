from __future__ import annotations

import sys
import types

import pytest
import torch

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.capture import capture_trackers, restore_trackers, tensorboard_dir


@pytest.fixture
def wandb(monkeypatch):
    """A module like Weights & Biases as far as it is looked at: `wandb.run.id`, None before `init()`."""
    module = types.ModuleType("wandb")
    module.run = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return module


def begin(wandb, identity):
    wandb.run = types.SimpleNamespace(id=identity)


def test_the_id_of_a_run_travels_with_the_checkpoint(tmp_path, wandb, monkeypatch):
    """After the resume, `wandb.init()` finds the id in the environment and goes on with the same curves."""
    checkpointer = Checkpointer({"weight": torch.zeros(1)}, run_dir=tmp_path, every=1)
    begin(wandb, "3k2j1h")
    assert checkpointer.save(1)
    wandb.run = None
    env = {}
    monkeypatch.setattr("resilience_sdk.checkpoint.capture.environment", lambda: env)
    assert Checkpointer({"weight": torch.zeros(1)}, run_dir=tmp_path).resume() == 1
    assert env == {"WANDB_RUN_ID": "3k2j1h", "WANDB_RESUME": "allow"}


def test_nothing_is_imported_or_captured_without_a_tracker(monkeypatch):
    """A program without W&B has no ids."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert capture_trackers() == {}
    assert "wandb" not in sys.modules


def test_what_the_user_set_is_left_alone(wandb):
    """An id in the environment wins over the checkpoint's."""
    env = {"WANDB_RUN_ID": "mine"}
    restore_trackers({"wandb": "other"}, env)
    assert env == {"WANDB_RUN_ID": "mine"}


def test_an_init_that_came_too_early_is_told(wandb, capsys):
    """Another run is active already: one line says in which order to call, and nothing is changed."""
    begin(wandb, "new")
    env = {}
    restore_trackers({"wandb": "old"}, env)
    assert env == {}
    assert "call it after start_run() or resume()" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [None, [], {"wandb": 3}, {"wandb": ""}, {"wandb": "a b\n"}, {"wandb": "x=1;y"}])
def test_what_is_no_id_is_ignored(wandb, saved):
    """Only what looks like an id gets into the environment."""
    env = {}
    restore_trackers(saved, env)
    assert env == {}


def test_tensorboard_goes_on_in_the_same_directory(tmp_path):
    """The directory is a function of the run directory alone."""
    assert tensorboard_dir(tmp_path) == tensorboard_dir(str(tmp_path)) == str(tmp_path / "tensorboard")
