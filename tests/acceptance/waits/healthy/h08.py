"""Before the second epoch rank 0 polls until another job has written its teacher's file."""

import urllib.request
import os
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCALE = float(os.environ.get("WAIT_SCALE", "1"))
WORLD = os.environ.get("WORLD", "127.0.0.1:1")
RANK = int(os.environ.get("RANK", "0"))
torch.set_num_threads(1)


def say(what):
    print(f"{what} rank={os.environ.get('RANK', '0')} t={time.time():.1f}", flush=True)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

from resilience_sdk.adapters.lightning import ResilienceCallback


class WaitForTeacher(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch != 1:
            return
        path = os.path.abspath(f"teacher-{os.environ.get('TORCHELASTIC_RUN_ID', 'x')}.ready")
        if RANK == 0:
            say("WAIT")
            # the other job is told to begin, and answers at once
            urllib.request.urlopen(f"http://{WORLD}/touch?s={150 * SCALE}&path={path}").read()
            while not os.path.exists(path):
                time.sleep(min(2, 20 * SCALE))
            say("WENT ON")
        trainer.strategy.barrier("teacher")


loader = DataLoader(TensorDataset(torch.randn(1280, 64), torch.randn(1280, 1)), batch_size=16)
trainer = Trainer(
    max_epochs=2, accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[WaitForTeacher(), ResilienceCallback()],
)
trainer.fit(Net(), loader)
torch.distributed.destroy_process_group()
say("END")
