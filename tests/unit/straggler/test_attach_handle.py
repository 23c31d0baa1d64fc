"""The handle of `straggler.attach`: what is left when it is detached, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.errors import ConfigError

from .attached import ALL, Net, batch, counts, train_step


def test_detached_it_is_as_it_was(recording, net, optimizer):
    """No hook is left, nothing is recorded; twice does no harm."""
    handle = straggler.attach(net, optimizer)
    train_step(net, optimizer)
    handle.detach()
    handle.detach()
    recording.harvest()
    train_step(net, optimizer)
    assert counts(recording) == {}
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert not net._forward_hooks_always_called
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("moment", ["after forward", "in backward", "in optimizer"])
def test_it_may_be_detached_in_the_middle(recording, net, optimizer, moment):
    """The step goes on, what was open is closed."""
    handle = straggler.attach(net, optimizer)
    output = net(batch())
    if moment == "after forward":
        handle.detach()
    elif moment == "in backward":
        next(net.parameters()).register_hook(lambda _: handle.detach())
    else:
        optimizer.register_step_pre_hook(lambda *_: handle.detach())
    output.sum().backward()
    optimizer.step()
    assert recording.stack() == []
    assert "optim" not in counts(recording)


def test_attached_twice_it_counts_once(recording, attached, net, optimizer):
    """The newer hooks replace the older, whose handle does nothing any more."""
    again = straggler.attach(net, optimizer)
    attached.detach()
    train_step(net, optimizer)
    assert counts(recording) == dict.fromkeys(ALL, 1)
    again.detach()


def test_copies_and_files_of_the_model_are_free_of_it(recording, net, optimizer):
    """The state is the same, and a copied or unpickled model works and records nothing."""
    model = nn.Sequential(nn.Linear(4, 4))
    before = model.state_dict()
    handle = straggler.attach(model)
    assert list(model.state_dict()) == list(before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
        other(batch()).sum().backward()
    straggler.attach(net, optimizer).detach()
    pickle.loads(pickle.dumps(optimizer))
    copy.deepcopy(optimizer)
    assert counts(recording) == {}
    handle.detach()


def test_the_model_can_be_freed(recording):
    """Hooks and handle keep no model alive, and the hooks on every optimizer stop when it is gone."""
    model = Net()
    kept = straggler.attach(model)
    gone = weakref.ref(model)
    model(batch()).sum().backward()
    del model
    gc.collect()
    assert gone() is None
    recording.harvest()
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step()
    assert counts(recording) == {}
    kept.detach()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "attach(5): expected the torch.nn.Module"),
        ((nn.Linear(1, 1), "adam"), "attach(model, str): expected a torch.optim.Optimizer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    """The error names what was given and what is expected."""
    with pytest.raises(ConfigError) as error:
        straggler.attach(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("keywords", [{"prefix": 3}, {"kernels_every": 0}, {"kernels_every": "5"}])
def test_wrong_keywords_are_refused(keywords):
    """The error names the keyword and the value."""
    (name, value) = next(iter(keywords.items()))
    with pytest.raises(ConfigError, match=rf"{name}={value!r}"):
        straggler.attach(nn.Linear(1, 1), **keywords)
