"""Accelerate: between two epochs the main process tokenises the next part of the corpus first."""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCALE = float(os.environ.get("WAIT_SCALE", "1"))
torch.set_num_threads(1)


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


def tokenise(seconds):
    words, until = {}, time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        for word in f"the {number} quick brown fox jumps over {number % 977} lazy dogs".split():
            words[word[:6]] = words.get(word[:6], 0) + 1
        number += 1
    return len(words)


accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(1280, 64), torch.randn(1280, 1)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 0:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                say("WAIT")
                print("words", tokenise(105 * SCALE), flush=True)
                say("WENT ON")
accelerator.end_training()
say("END")
