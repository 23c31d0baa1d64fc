"""Accelerate: one line behind `prepare` watches, saves, resumes and stops a training.

    pip install accelerate
    resilience run --nproc-per-node 2 --run-dir runs/accelerate examples/accelerate_train.py --steps 200
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_train.py --steps 200
    resilience run --accelerate-config fsdp.yaml --run-dir runs/accelerate examples/accelerate_train.py
    python examples/accelerate_train.py --steps 200

Learns the next letter of the documentation of Python's own modules. Send it SIGTERM and start it again (with
RESILIENCE_RUN_DIR=runs/accelerate, where our launcher does not name one): it goes on at the next sample.
"""

from __future__ import annotations

import argparse
import importlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters import accelerate as resilience

WINDOW, LETTERS = 16, 128
MODULES = ("argparse", "collections", "functools", "heapq", "logging", "pickle", "random", "re", "subprocess", "typing")


def windows() -> TensorDataset:
    """Return pieces of a text that every machine with Python has, and the letter after each."""
    text = "".join(importlib.import_module(name).__doc__ or "" for name in MODULES)
    codes = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
    pieces = codes.unfold(0, WINDOW + 1, 1)
    return TensorDataset(pieces[:, :-1], pieces[:, -1])


def main(steps: int) -> None:
    """Train for so many steps, over all starts with the same run directory."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    net = nn.Sequential(
        nn.Embedding(LETTERS, 16), nn.Flatten(), nn.Linear(16 * WINDOW, 64), nn.ReLU(), nn.Linear(64, LETTERS)
    )
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=3e-3), DataLoader(windows(), batch_size=32, shuffle=True)
    )
    with resilience.attach(accelerator, checkpoint_every=50) as handle:  # behind prepare; resumes by itself
        while handle.step < steps:
            for inputs, targets in loader:  # after a resume: what is left of the epoch
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and handle.step % 50 == 0:
                    accelerator.print(f"step {handle.step:4}  epoch {handle.epoch}  loss {loss.item():.3f}")
                if handle.step >= steps:
                    break
    accelerator.print(f"finished after step {handle.step}, {handle.samples} samples")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
