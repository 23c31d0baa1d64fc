"""Unchanged Lightning with a hook that takes its lock twice."""
import os
import threading
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import told


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = told.new_model()
        self.lock = threading.Lock()

    def training_step(self, batch):
        time.sleep(told.pace("step", 0.1))
        return told.loss_of(self.net, self.global_step)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with self.lock:
            self.note(batch_idx)

    def note(self, batch_idx):
        if told.rank() == 1 and batch_idx == 20 and told.first_time():
            self.lock.acquire()  # STUCK-HERE

    def validation_step(self, batch):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=told.LR)


def main():
    told.up()
    torch.set_num_threads(1)
    data = TensorDataset(torch.arange(400))
    trainer = pl.Trainer(
        max_steps=told.total(), accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, val_check_interval=10, num_sanity_val_steps=0, limit_val_batches=2,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    told.end()


if __name__ == "__main__":
    main()
