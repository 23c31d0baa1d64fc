"""A small Lightning training whose every bit depends on the order of its data and on its random numbers."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

pl = importlib.import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))
logging.getLogger(pl.__name__).setLevel(logging.ERROR)
warnings.simplefilter("ignore")
torch.set_num_threads(1)
told = Path(os.environ.get("TOLD", "."))


class Noise(Dataset):
    """Samples that are drawn anew each time, from the generator of the process."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index % 13)]), torch.rand(7)])


class Module(pl.LightningModule):
    """Two layers and dropout; tells each completed step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))

    def on_train_start(self) -> None:
        """Tell where this attempt begins."""
        tell(f"start-{self.global_rank}", step=self.trainer.global_step, pid=os.getpid())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log a number."""
        self.log("val", self.net(batch).mean(), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        """Tell how far this rank is."""
        tell(f"step-{self.global_rank}", step=self.trainer.global_step)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an optimizer with state, and a schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 50)}


def loader(samples: int = 1 << 16) -> StatefulDataLoader:
    """Return a loader that knows where it is."""
    return StatefulDataLoader(Noise(samples), batch_size=4, shuffle=True)


def trainer(*callbacks: Any, **options: Any) -> Any:
    """Return a trainer that says and writes as little as it can."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **{"accelerator": "cpu", "devices": 1, **quiet, **options})


def tell(name: str, **facts: Any) -> None:
    """Leave facts for the test, as a whole or not at all."""
    part = told / f".{name}.part"
    part.write_text(json.dumps(facts))
    part.replace(told / name)


def digest(module: nn.Module) -> str:
    """Return what is equal only for equal weights."""
    total = hashlib.sha256()
    for value in module.state_dict().values():
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]
