"""What fails while an adapter is hung on leaves the framework as it was found."""

from types import SimpleNamespace

import pytest
import torch

from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters.lightning import roles
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.transformers.seams import Seams
from resilience_sdk.errors import ConfigError


class Sgd(torch.optim.SGD):
    """An optimizer that takes no hook behind its step."""

    def register_step_post_hook(self, hook):
        """Refuse."""
        raise RuntimeError("no hook")


class Batches(list):
    """What is iterated."""


def test_pytorch_takes_all_off_again():
    """Model, optimizer and loader, and the next attach finds no other one."""
    model, loader = torch.nn.Linear(2, 2), Batches([1])
    refusing = Sgd(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="no hook"):
        pytorch.attach(model, refusing, loader)
    assert type(loader) is Batches
    assert not refusing._optimizer_step_pre_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with pytorch.attach(model, torch.optim.SGD(model.parameters(), 0.1), loader):
        pass


def test_a_trainer_has_its_methods_again():
    """Here a model that cannot be timed."""

    class Trainer:
        model, model_wrapped, optimizer = None, "no model", None

        def get_batch_samples(self): ...

        def evaluate(self): ...

    trainer = Trainer()
    with pytest.raises(ConfigError):
        Seams(trainer)
    assert vars(trainer) == {}


def test_a_fit_that_cannot_save_gives_the_profiler_back():
    """The callback has no fit yet, and could not end it."""

    class Session:
        """One without settings."""

    profiler, strategy = object(), SimpleNamespace()
    trainer = SimpleNamespace(profiler=profiler, fast_dev_run=False, strategy=strategy)
    with pytest.raises(AttributeError):
        Fit(trainer, frozenset({roles.SECTIONS, roles.CHECKPOINT}), Session(), resumes=False, log=None)
    assert trainer.profiler is profiler
