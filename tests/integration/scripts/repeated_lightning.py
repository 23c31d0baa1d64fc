"""As `repeated.py`, with Lightning: `repeated_lightning.py KIND`."""

import logging
import warnings

import lightning.pytorch as pl
from lightning.pytorch.plugins import MixedPrecision
from repeated_kinds import (
    FACTOR,
    KIND,
    PER_STEP,
    RANKS,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    make_loader,
    plant,
    restored,
    set_own_rate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters.lightning import ResilienceCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Module(pl.LightningModule):
    """A model, and what a resume finds other."""

    def __init__(self):
        super().__init__()
        self.model, self.scheduler = Model(), None

    def on_train_start(self):
        """Set a rate of one's own."""
        if KIND != "rate":
            set_own_rate(self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler)

    def load_state_dict(self, state, *args, **options):
        """Make it anew, where that is asked for."""
        found = super().load_state_dict(state, *args, **options)
        restored(self.model)
        return found

    def on_train_batch_start(self, batch, number):
        """Plant."""
        plant(self.global_step, self.model)

    def training_step(self, batch):
        """Return the loss."""
        return self.model(batch[0]).square().mean() * FACTOR

    def on_train_batch_end(self, *_):
        """Step the scheduler of the script's own."""
        if self.scheduler is not None:
            self.scheduler.step()

    def configure_optimizers(self):
        """Return the optimizer, and its scheduler."""
        optimizer = Optimizer(self.parameters())
        scheduler = Scheduler(optimizer)
        if KIND == "rate":
            self.scheduler = scheduler
            return optimizer
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


loader = make_loader()
if KIND == "stateful":
    loader = StatefulDataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
trainer = pl.Trainer(
    callbacks=[ResilienceCallback(checkpoint_every=5)],
    max_epochs=2 * PER_STEP,
    accumulate_grad_batches=PER_STEP,
    accelerator="cpu",
    devices=RANKS,
    strategy="ddp" if RANKS > 1 else "auto",
    plugins=[MixedPrecision("16-mixed", "cpu", Scaler())] if KIND == "scaler" else None,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), loader)
