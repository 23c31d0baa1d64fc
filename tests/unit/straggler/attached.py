"""A model of a few layers that the tests of `straggler.attach` train, and what is recorded of it."""

from __future__ import annotations

import time

import torch
from torch import nn

ALL = ("fwd", "bwd", "comm_wait", "optim")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError("backward")


class Net(nn.Module):
    """A model whose forward and backward take what they are told to take, in seconds."""

    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.forward_s, self.backward_s = forward_s, backward_s
        self.fails: str | None = None
        self.wrap = lambda output: output

    def forward(self, x):
        if self.fails == "forward":
            raise OSError("forward")
        output = _Sleep.apply(self.layers(x), self.forward_s, self.backward_s)
        return self.wrap(_Fail.apply(output) if self.fails == "backward" else output)


def batch():
    return torch.randn(2, 4)


def counts(recording):
    return {name: len(samples) for name, samples in recording.harvest().items()}


def train_step(net, optimizer):
    """Train for one step; return how long it took, in seconds: less the sleeps of others, no section took longer."""
    began = time.monotonic()
    net(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.monotonic() - began
