"""The contract's training with Lightning: DDP, and `ResilienceCallback`."""

from __future__ import annotations

import logging
import os
import warnings

import contract_script as contract
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

import resilience_sdk
from resilience_sdk.adapters.lightning import ResilienceCallback

CONTRACT = {"module": "lightning.pytorch", "package": "lightning torchdata"}

BATCH = 4
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
args = contract.arguments()
torch.set_num_threads(1)
torch.manual_seed(0)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Module(pl.LightningModule):
    """The contract's network, and what it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.net = contract.Net(args)
        self.told: contract.Steps | None = None

    def on_train_start(self) -> None:
        """Tell where this attempt begins."""
        self.told = contract.Steps(self.trainer.global_step)
        self.told.watch(self.optimizers().optimizer)
        contract.prepared()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Evaluate."""
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trainer_with(*callbacks: ResilienceCallback) -> pl.Trainer:
    """Return a trainer with these callbacks."""
    return pl.Trainer(
        callbacks=list(callbacks),
        max_steps=args.steps,
        limit_val_batches=contract.EVALUATED if args.evaluate else 0,
        val_check_interval=args.evaluate * args.accumulate or None,
        check_val_every_n_epoch=None if args.evaluate else 1,
        accumulate_grad_batches=args.accumulate,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def hung() -> list[object]:
    """Return what the adapter may have hung on the trainer, the model and the loader."""
    strategy = [name for name in vars(trainer.strategy) if name.endswith("_step")]
    return [type(trainer.profiler).__name__, strategy, *contract.traces(module.net, loader)]


callback = ResilienceCallback(save=bool(args.save), **contract.saves(args))
module = Module()
loader = StatefulDataLoader(Subset(contract.Numbers(), range(rank, contract.SAMPLES, ranks)), batch_size=BATCH)

caught = second = None
try:
    trainer_with(callback, ResilienceCallback()).fit(Module(), loader)
except resilience_sdk.ConfigError as error:
    second = f"ConfigError: {error}"

trainer = trainer_with(callback)
before = hung()
try:
    trainer.fit(module, loader, DataLoader(contract.Numbers(), batch_size=BATCH))
except contract.StepError as error:
    caught = str(error)
contract.end(module.told, module.net, before=before, after=hung(), second=second, caught=caught)
