"""The producer thread of rank 1 dies of an exception; the step waits for its queue for ever."""

import queue
import threading
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
        batches.next(index)
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)



def first_time():
    """True in the first attempt only: the job goes well when it is started again."""
    name = f"been-stuck-{os.environ.get('RANK', '0')}"
    if os.path.exists(name):
        return False
    open(name, "w").close()
    print(f"STUCK_AT {time.time():.3f} rank={os.environ.get('RANK', '0')}", flush=True)
    return True


class Batches:
    def __init__(self):
        self.queue = queue.Queue(2)
        self.bad = None
        threading.Thread(target=self._produce, name="producer", daemon=True).start()

    def _produce(self):
        for number in range(10_000):
            if self.bad is not None and number > self.bad:
                raise ValueError("cannot decode image")
            self.queue.put(number)

    def next(self, index):
        if RANK == 1 and index == 30 and self.bad is None:
            self.bad = -1 if first_time() else 10**9
        return self.queue.get()  # STUCK-HERE


batches = Batches()

loader = DataLoader(TensorDataset(torch.randn(1280, 64), torch.randn(1280, 1)), batch_size=16)
trainer = Trainer(
    max_epochs=2, accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[],
)
trainer.fit(Net(), loader)
torch.distributed.destroy_process_group()
say("END")
