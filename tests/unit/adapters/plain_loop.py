"""A training loop without a line of ours."""

from __future__ import annotations


def train_step(model, optimizer, batch, micro_batches=1):
    for _ in range(micro_batches):
        model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, loader, micro_batches=1):
    for (batch,) in loader:
        train_step(model, optimizer, batch, micro_batches)


def counts(recording):
    return {name: len(samples) for name, samples in recording.harvest().items()}
