"""What is kept of a training that listens."""

import gc
import types
import weakref

import pytest

from resilience_sdk.preemption import listener as rank


@pytest.fixture
def listener(monkeypatch):
    listener = types.SimpleNamespace(save_s=float)
    monkeypatch.setattr(rank, "_started", lambda: listener)
    return listener


class Training:
    """What knows how long its saves take."""

    def save_s(self):
        return 3.0


def test_a_training_that_has_ended_is_not_kept(listener):
    """Its model may be most of the memory, and another training begins."""
    training = Training()
    rank.begin(training.save_s)
    assert listener.save_s() == 3.0
    seen = weakref.ref(training)
    del training
    gc.collect()
    assert seen() is None
    assert listener.save_s() == 0.0


def test_a_function_is_kept(listener):
    """There is no object that it speaks of."""
    rank.begin(lambda: 2.0)
    gc.collect()
    assert listener.save_s() == 2.0
