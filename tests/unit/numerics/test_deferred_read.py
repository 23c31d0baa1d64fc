"""Values of each kind are read once, a call late, and never waited for."""

import numpy
import pytest
import torch

from resilience_sdk.errors import ConfigError
from resilience_sdk.numerics.deferred_read import DeferredRead, StepValues


@pytest.mark.parametrize(
    "value", [2.5, numpy.float32(2.5), torch.tensor(2.5), torch.tensor([2.5], requires_grad=True).half()]
)
def test_a_number_in_any_form_is_read(value):
    """Floats, numpy's, tensors of one element, in any precision."""
    reading = DeferredRead()
    reading.put(3, True, value, None)
    assert reading.ready() == [(3, True, 2.5, None)]
    assert reading.ready() == []


def test_a_value_is_kept_as_it_was_given():
    """A buffer that the training reuses in place does not change what was handed over."""
    buffer = torch.tensor(1.0)
    reading = DeferredRead()
    reading.put(0, True, buffer, None)
    buffer.fill_(float("nan"))
    assert reading.ready() == [(0, True, 1.0, None)]


@pytest.mark.parametrize("value", [torch.ones(2), "high", [1.0, 2.0]])
def test_what_is_no_number_is_refused_by_name(value):
    """The error says which argument, what it was and what to pass."""
    with pytest.raises(ConfigError, match=r"numerics\.check\(loss=.*one element.*loss\.mean"):
        DeferredRead().put(0, True, value, None)


class LateCopy:
    """Stands in for the event of a device that is still at work."""

    def __init__(self):
        self.is_done = False

    def query(self):
        return self.is_done

    def synchronize(self):
        self.is_done = True


def test_a_device_that_is_behind_is_not_waited_for_until_the_end():
    """Values on their way stay where they are, in order; far behind, a step is left out; an end waits."""
    reading = DeferredRead()
    late = LateCopy()
    reading._waiting.append(StepValues(0, True, 1.0, None, copied=late))
    for step in range(1, 20):
        reading.put(step, True, float(step), None)
    assert reading.ready() == []
    assert reading.left_out == 4
    assert [step for step, *_ in reading.ready(wait=True)] == list(range(16))
    assert late.is_done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_cuda_nothing_waits_for_the_device():
    """Under torch's own watch for synchronizing calls: none is made, and the value arrives."""
    reading = DeferredRead()
    reading.put(0, True, torch.tensor(1.0, device="cuda"), None)
    reading.ready(wait=True)  # the buffers are made
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = torch.ones(4096, 4096, device="cuda").square().mean()
        reading.put(1, True, loss, loss * float("inf"))
        reading.ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert reading.ready() in ([(1, True, 1.0, float("inf"))], [])
