"""Trainer: behind a save rank 0 pushes to a hub that limits its rate, with exponential back-off."""

import urllib.error
import urllib.request
import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

SCALE = float(os.environ.get("WAIT_SCALE", "1"))
WORLD = os.environ.get("WORLD", "127.0.0.1:1")
RANK = int(os.environ.get("RANK", "0"))
torch.set_num_threads(1)


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


class Rows(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(64, generator=generator)
        return {"x": x, "labels": x.sum()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x, labels=None):
        out = self.net(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


from resilience_sdk.adapters.transformers import ResilienceCallback


class Push(TrainerCallback):
    pushed = False

    def on_save(self, args, state, control, **kwargs):
        if RANK != 0 or self.pushed:
            return
        self.pushed = True
        say("WAIT")
        for pause in (10, 20, 40, 75, 100):
            try:
                urllib.request.urlopen(f"http://{WORLD}/times?key=push-{os.getpid()}&n=4").read()
                break
            except urllib.error.HTTPError as error:
                print(f"{error.code}, trying again in {pause} s", flush=True)
                time.sleep(pause * SCALE)
        say("WENT ON")


arguments = TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=20,
    save_strategy="steps", save_steps=30, save_total_limit=2, report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True,
    ddp_find_unused_parameters=False,
)

trainer = Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[Push(), ResilienceCallback()])
trainer.train()
trainer.accelerator.end_training()
say("END")
