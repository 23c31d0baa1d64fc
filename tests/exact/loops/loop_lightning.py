"""A fit of Lightning, as docs/adapters/lightning.md writes it; alone with `ModelCheckpoint` and `ckpt_path="last"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import telling as t
import torch
import torchmetrics
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

o = t.options
t.seed()


class Module(pl.LightningModule):
    """A network with dropout, an average, and metrics of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = t.same_net()
        self.register_buffer("average", torch.zeros(()))
        self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        number = self.current_epoch * 6 + batch_idx
        t.at_step(self.global_step)
        if batch_idx % t.ACCUMULATE == 1:
            t.reach("window", self.global_step)
        t.tell("epoch", self.global_step, self.current_epoch)
        if isinstance(batch, dict):
            t.tell_batch(number, batch["a"])
            t.tell_batch(number, batch["b"], "samples of a second loader")
            batch = batch["a"] + batch["b"][:1]
        else:
            t.tell_batch(number, batch)
        loss = t.loss_of(self.net, batch)
        t.tell("losses", number, loss.item())
        t.tell("learning rates", number, t.rate_of(self.trainer.optimizers[0]))
        self.log("train", loss, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.all.update(batch[:, 0])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Average the weights, draw."""
        number = self.current_epoch * 6 + batch_idx
        self.average.mul_(0.9).add_(self.net.layers[0].weight.sum().detach() * 0.1 + torch.rand(()))
        self.log("average", self.average)
        t.tell("averages", number, self.average.item())
        t.tell("weights", number, t.digest(list(self.net.parameters())))
        t.tell("optimizer and scaler", number, t.digest(self.trainer.optimizers[0].state_dict()["state"]))
        t.tell_generators(number)

    def on_train_epoch_end(self) -> None:
        """Look at the whole epoch."""
        t.tell("epoch metrics", self.current_epoch, sorted(torch.as_tensor(self.all.compute()).tolist()))
        self.all.reset()
        t.reach("behind", self.current_epoch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log a number that is drawn, too."""
        value = self.net(batch).mean() + torch.rand(())
        if batch_idx == 1:
            t.reach("evaluation", self.current_epoch)
        t.tell("evaluations", [self.current_epoch, self.global_step, batch_idx], value.item())
        self.log("val", value, sync_dist=t.ranks > 1)

    def on_train_end(self) -> None:
        """Tell of the end."""
        t.tell("callbacks", "train end", [self.global_step, self.current_epoch])

    def configure_optimizers(self) -> Any:
        """Return an optimizer with state, and a schedule."""
        optimizer = t.optimizer_of(self)
        schedule = {"scheduler": t.schedule_of(optimizer)}
        kind = o.get("schedule")
        schedule |= {"monitor": "val"} if kind == "metric" else {"interval": "step" if kind == "step" else "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Record(Logger):
    """Tells what is logged."""

    name, version = "record", "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Tell it."""
        if t.rank == 0:
            t.tell("log records", [step, sorted(metrics)], {name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """There are none."""


class Patience(pl.callbacks.EarlyStopping):
    """Tells what it counts."""

    def on_validation_end(self, *given: Any) -> None:
        """Count."""
        super().on_validation_end(*given)
        t.tell("callbacks", ["patience", given[0].global_step], [self.wait_count, float(self.best_score)])


def loader_of(kind: str) -> Any:
    """Return the loader."""
    data, workers = t.Noisy(), 2 if "workers" in kind else 0
    if kind == "stateful stream":
        return StatefulDataLoader(t.StatefulStream(), t.BATCH)
    if kind == "stream":
        return DataLoader(t.Stream(), t.BATCH)
    if kind == "two":
        return {"a": DataLoader(data, t.BATCH, shuffle=True), "b": DataLoader(t.Noisy(20, 100), 2, shuffle=True)}
    make = StatefulDataLoader if "stateful" in kind else DataLoader
    if "distributed" in kind:
        return make(data, t.BATCH, sampler=DistributedSampler(data, t.ranks, t.rank), num_workers=workers)
    return make(data, t.BATCH, shuffle=True, num_workers=workers)


best = pl.callbacks.ModelCheckpoint(f"{o['scratch']}/best", monitor="val", save_top_k=2, filename="{step}")
callbacks: list[Any] = [best, Patience("val", patience=20)]
path = None
if t.alone:
    keeps = pl.callbacks.ModelCheckpoint(f"{o['scratch']}/kept", every_n_train_steps=t.EVERY, save_last=True)
    callbacks.append(keeps)
    if (Path(o["scratch"]) / "kept").is_dir():
        path = "last"
else:
    from resilience_sdk.adapters.lightning import ResilienceCallback

    callbacks.append(ResilienceCallback(checkpoint_every=t.EVERY))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=t.ranks,
    strategy="ddp" if t.ranks > 1 else "auto",
    max_epochs=t.EPOCHS,
    accumulate_grad_batches=t.ACCUMULATE,
    logger=Record(),
    log_every_n_steps=2,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
    callbacks=callbacks,
    num_sanity_val_steps=0,
    **o.get("arguments", {}),
)
module = Module()
trainer.fit(module, loader_of(o["loader"]), DataLoader(t.Noisy(12, 200), 4), ckpt_path=path)
t.tell_generators("end")
t.tell("end", "weights", t.digest(list(module.parameters())))
if t.rank == 0:
    score = None if best.best_model_score is None else float(best.best_model_score)
    files = sorted(file.name for file in Path(f"{o['scratch']}/best").iterdir())
    t.tell("best markers", "end", [Path(best.best_model_path).name, score, files])
