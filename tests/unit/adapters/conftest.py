"""A small model, its optimizer and its loader; and whoever is asked whether to stop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk import preemption
from resilience_sdk.adapters import _base


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)


@pytest.fixture
def asked(monkeypatch):
    """The steps whose check says that all ranks stop; every check is noted in `asked.checks`."""

    class Asked(set):
        checks: list

    asked = Asked()
    asked.checks = []

    def check(step=None):
        asked.checks.append(step)
        return step in asked

    monkeypatch.setattr(preemption, "check", check)
    return asked


@pytest.fixture(autouse=True)
def detached():
    """No test leaves its loop attached."""
    yield
    if _base._current is not None:
        _base._current.detach()
