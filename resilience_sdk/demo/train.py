"""Train a small transformer to write Python, on the source text of Python's own library.

    resilience run --nproc-per-node 2 train.py --out results

An ordinary data-parallel script for the CPU. Two lines make it survive: `start_run` is told what makes up the
training's state, and the loop takes its batches from `run.steps`, which resumes, beats, saves, and stops in
time. Whatever happens in between, the last line of it is the same, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import resilience_sdk

WINDOW = 64  # bytes that the model looks back
BATCH = 16  # windows in a batch of one rank
STEPS_PER_EPOCH = 60
EPOCHS = 2


class ByteModel(nn.Module):
    """Predicts the next byte of a text from the bytes before it."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        """Build a decoder of `layers` blocks."""
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(WINDOW, width)
        block = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next byte, for windows of shape (batch, WINDOW)."""
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.bytes(text) + self.places(places)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def load_windows(count: int) -> Tensor:
    """Return `count` windows of WINDOW + 1 bytes from the standard library's sources."""
    needed = count * (WINDOW + 1)
    text = bytearray()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= needed:
            break
    if len(text) < needed:
        raise SystemExit("the sources of Python's standard library are not on this machine")
    return torch.frombuffer(text, dtype=torch.uint8)[:needed].view(count, WINDOW + 1).long()


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters: equal only if every bit of every one is equal."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes(parameter.detach().contiguous().view(torch.uint8).flatten().tolist()))
    return digest.hexdigest()


def train(out: Path) -> None:
    """Train, and write what came of it to `out`, one file per rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    windows = load_windows(STEPS_PER_EPOCH * BATCH * world_size + BATCH)
    training, held_out = windows[:-BATCH], windows[-BATCH:]
    sampler = DistributedSampler(training, shuffle=True)
    loader = DataLoader(training, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(ByteModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first_step: int | None = None
    with resilience_sdk.start_run(state={"model": model, "optimizer": optimizer, "data": loader}) as run:
        for step, batch in run.steps(loader, epochs=EPOCHS):
            first_step = step if first_step is None else first_step
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 20 == 0:
                print(f"step {step:3}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        final_loss = loss_of(model.module, held_out).item()
    result = {"first_step": first_step, "loss": final_loss.hex(), "parameters": checksum(model)}
    (out / f"rank-{rank}.json").write_text(json.dumps(result) + "\n")
    if rank == 0:
        print(f"held-out loss {final_loss:.6f}")


def main() -> None:
    """Read the command line, join the other ranks, train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    dist.init_process_group("gloo")
    try:
        train(out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
