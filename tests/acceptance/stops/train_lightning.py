import os
import work
work.log("up")
import warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, _ = work.make()

    def training_step(self, batch, batch_idx):
        import time

        time.sleep(work.pace("step", 0.1))
        # the data follow from the step alone, not from the loader
        return work.loss_of(self.model, self.global_step * work.world() + work.rank())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        work.log("step", step=self.global_step - 1)

    def validation_step(self, batch, batch_idx):
        work.log("val", batch=batch_idx)
        work.busy(work.pace("val", 1.5))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


callbacks = []
if not os.environ.get("STOPS_PLAIN"):
    from resilience_sdk.adapters.lightning import ResilienceCallback

    callbacks = [ResilienceCallback()]
trainer = pl.Trainer(
    accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp", max_steps=work.TOTAL, val_check_interval=10,
    limit_val_batches=6, num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=callbacks, default_root_dir=work.HERE,
)
module = Module()
trainer.fit(module, DataLoader(range(4000), batch_size=1), DataLoader(range(40), batch_size=1))
work.finish(module.model, trainer.global_step)
