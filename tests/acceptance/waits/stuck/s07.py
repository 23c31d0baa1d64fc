"""Trainer: the loss of rank 1 asks a judge over HTTP that takes the request and never answers."""

import http.client
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



def first_time():
    """True in the first attempt only: the job goes well when it is started again."""
    name = f"been-stuck-{os.environ.get('RANK', '0')}"
    if os.path.exists(name):
        return False
    open(name, "w").close()
    print(f"STUCK_AT {time.time():.3f} rank={os.environ.get('RANK', '0')}", flush=True)
    return True


class Judged(Trainer):
    calls = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.calls += 1
        if self.calls == 30 and RANK == 1 and first_time():
            connection = http.client.HTTPConnection(WORLD)
            connection.request("GET", "/never")
            connection.getresponse()  # STUCK-HERE
        return super().compute_loss(model, inputs, *args, **kwargs)


arguments = TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=20,
    save_strategy="no", save_steps=500, save_total_limit=2, report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True,
    ddp_find_unused_parameters=False,
)

trainer = Judged(Net(), arguments, train_dataset=Rows())
trainer.train()
trainer.accelerator.end_training()
say("END")
