"""Transformers: one callback watches, resumes and stops a Trainer, and marks what it saves.

    pip install transformers accelerate
    resilience run --nproc-per-node 2 --run-dir runs/gpt2 examples/trainer_fit.py --steps 200
    torchrun --standalone --nproc-per-node 2 examples/trainer_fit.py --steps 200
    python examples/trainer_fit.py --steps 200

Trains a small GPT-2 from nothing on the documentation of Python's own modules, letter by letter; nothing is downloaded.
Send it SIGTERM, or kill it while it saves, and start it again: it goes on behind the newest complete checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from resilience_sdk.adapters.transformers import ResilienceCallback

WINDOW, LETTERS = 32, 128
MODULES = ("argparse", "collections", "functools", "heapq", "logging", "pickle", "random", "re", "subprocess", "typing")


def windows() -> list[dict[str, torch.Tensor]]:
    """Return pieces of a text that every machine with Python has."""
    text = "".join(importlib.import_module(name).__doc__ or "" for name in MODULES)
    letters = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
    return [{"input_ids": piece, "labels": piece} for piece in letters.unfold(0, WINDOW, 4)]


def small_gpt2() -> GPT2LMHeadModel:
    """Return a model that trains on a CPU."""
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=LETTERS, n_positions=WINDOW, n_embd=32, n_layer=2, n_head=2, **special)
    )


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
torch.set_num_threads(1)
torch.manual_seed(0)
run_dir = os.environ.get("RESILIENCE_RUN_DIR", "runs/gpt2")
trainer = Trainer(
    small_gpt2(),
    TrainingArguments(
        output_dir=f"{run_dir}/trainer",
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        save_steps=50,
        save_total_limit=2,
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=windows(),
    callbacks=[ResilienceCallback(run_dir)],
)
result = trainer.train()  # resumes by itself
if trainer.is_world_process_zero():
    print(f"finished after step {result.global_step}, loss {result.training_loss:.3f}")
