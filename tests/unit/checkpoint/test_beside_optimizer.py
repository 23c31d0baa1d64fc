"""What an optimizer holds beside its state_dict: said where a training changes it, and not where it is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.core import resume_limits


class Sam(torch.optim.Optimizer):
    """Steps by an optimizer within, whose momentum is in no state_dict."""

    def __init__(self, weights, rate=0.1):
        super().__init__(weights, {"lr": rate})
        self.base = torch.optim.SGD(self.param_groups, rate, momentum=0.9)
        self.param_groups, self.weights = (
            self.base.param_groups,
            [one for g in self.param_groups for one in g["params"]],
        )

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.weights:
            self.state[weight]["old"] = weight.clone()
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """Its base was never made; slow weights and a counter of its own."""

    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
        self._optimizer_step_pre_hooks = base._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = base._optimizer_step_post_hooks
        self.slow, self.count = [one.detach().clone() for g in self.param_groups for one in g["params"]], 0

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)

    def step(self, closure=None):
        self.base.step(closure)
        self.count += 1
        for slow, fast in zip(self.slow, (one for g in self.param_groups for one in g["params"]), strict=True):
            slow.add_(fast.detach() - slow, alpha=0.5)
            if self.count % 3 == 0:
                fast.data.copy_(slow)


class Whole(Lookahead):
    """Saves it all."""

    def state_dict(self):
        return {**super().state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.slow, self.count = state.pop("slow"), state.pop("count")
        super().load_state_dict(state)


class Wrapper(torch.optim.Optimizer):
    """Saves what the one within has, which is not its own."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base = base

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)

    def step(self, closure=None):
        self.base.step(closure)


def adam(weights):
    return torch.optim.AdamW(weights, 0.1)


KINDS = {
    "sam": (lambda weights: {"optimizer": Sam(weights)}, "base.state of the optimizer optimizer"),
    "lookahead": (lambda weights: {"optimizer": Lookahead(adam(weights))}, "count, slow of the optimizer optimizer"),
    "whole": (lambda weights: {"optimizer": Whole(adam(weights))}, None),
    "wrapper": (lambda weights: {"optimizer": Wrapper(adam(weights))}, None),
    "plain": (lambda weights: {"optimizer": adam(weights)}, None),
    "given": (lambda weights: {"optimizer": (one := Sam(weights)), "base": one.base}, None),
}


def train(path, make, steps=6):
    model = nn.Linear(2, 1)
    state = {"model": model, **make(list(model.parameters()))}
    saver = Checkpointer(state, run_dir=path, every=2)
    begin = saver.resume()
    for step in range(begin, begin + steps):
        state["optimizer"].zero_grad()
        model(torch.rand(4, 2)).mean().backward()
        state["optimizer"].step()
        saver.maybe_save(step + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_is_said_at_the_start_and_at_the_resume(tmp_path, monkeypatch, kind):
    """And what is saved is not."""
    make, words = KINDS[kind]
    for _ in range(2):
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        train(tmp_path, make)
        assert [limit.thing for limit in resume_limits.limits()] == ([] if words is None else [words])


def test_what_the_program_restores_is_not_said_at_the_resume(tmp_path, monkeypatch):
    """Before the first step."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    made = []

    def make(weights):
        made.append(Lookahead(adam(weights)))
        if len(made) > 1:
            made[1].count, made[1].slow = made[0].count, [one.clone() for one in made[0].slow]
        return {"optimizer": made[-1]}

    train(tmp_path, make)
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    train(tmp_path, make)
    assert resume_limits.limits() == ()
