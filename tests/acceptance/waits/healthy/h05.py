"""A callback lets the machine cool down behind the first epoch; it can be cut short by an Event."""

import threading
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


class CoolDown(TrainerCallback):
    def __init__(self, seconds):
        self.seconds = seconds
        self.enough = threading.Event()

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.epoch < 1.5:
            say("WAIT")
            self.enough.wait(self.seconds)
            say("WENT ON")


arguments = TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=20,
    save_strategy="no", save_steps=500, save_total_limit=2, report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True,
    ddp_find_unused_parameters=False,
)

trainer = Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[CoolDown(120 * SCALE)])
trainer.train()
trainer.accelerator.end_training()
say("END")
