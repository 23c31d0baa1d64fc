"""A model with sections by hooks, in a process that records."""

from __future__ import annotations

import pytest
import torch

from resilience_sdk import straggler
from resilience_sdk.straggler.gpu import GpuClock

from .attached import Net
from .device import Device


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def optimizer(net):
    return torch.optim.SGD(net.parameters(), 0.1)


@pytest.fixture
def attached(recording, net, optimizer):
    handle = straggler.attach(net, optimizer)
    yield handle
    handle.detach()


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def clock(device):
    return GpuClock(device)
