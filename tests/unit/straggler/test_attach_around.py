"""A method of the model that is called in the place of the model, as some frameworks do it."""

import torch

from resilience_sdk import straggler


def test_a_call_is_a_forward_and_what_it_gives_leads_to_the_backward(recording):
    """Though the model itself was never called; detached, it is not."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = straggler.attach(model, optimizer)
    training_step = handle.around(lambda batch: {"loss": torch.nn.functional.linear(batch, model.weight).sum()})
    training_step(torch.ones(3, 2))["loss"].backward()
    optimizer.step()
    handle.detach()
    training_step(torch.ones(3, 2))
    assert {name: _passes(recording.recorder, name) for name in ("fwd", "bwd", "comm_wait", "optim")} == {
        "fwd": 1,
        "bwd": 1,
        "comm_wait": 1,
        "optim": 1,
    }


def _passes(recorder, name):
    return sum(block.n for lane in recorder._lanes.values() for block in lane.blocks.values() if block.name == name)
