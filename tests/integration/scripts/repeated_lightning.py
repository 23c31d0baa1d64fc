"""As `repeated.py`, with Lightning: `repeated_lightning.py KIND`."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from repeated_kinds import IS_AGAIN, KIND, Mean, Model, make_loader, plant
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters.lightning import ResilienceCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
PER_STEP = {"accumulated": 2, "accumulation": 1 + IS_AGAIN}.get(KIND, 1)


class Module(pl.LightningModule):
    """A model, and what a resume finds other."""

    def __init__(self):
        super().__init__()
        self.model, self.mean = Model(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)), Mean()
        self.scheduler = None

    def on_train_start(self):
        """Set a rate of one's own."""
        if KIND == "own rate" and IS_AGAIN:
            self.trainer.lr_scheduler_configs[0].scheduler.base_lrs = [1.0]
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0

    def load_state_dict(self, state, *args, **options):
        """Make it anew, where that is asked for."""
        found = super().load_state_dict(state, *args, **options)
        if KIND == "weights":
            torch.nn.init.ones_(self.model[0].weight)
        return found

    def on_train_batch_start(self, batch, number):
        """Plant."""
        plant(self.global_step)

    def training_step(self, batch):
        """Return the loss."""
        return self.model(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        """Step the scheduler of the script's own."""
        if self.scheduler is not None:
            self.scheduler.step()

    def configure_optimizers(self):
        """Return the optimizer, and its scheduler."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
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
    devices=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), loader)
