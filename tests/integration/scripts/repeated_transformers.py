"""As `repeated.py`, with the Trainer of Hugging Face: `repeated_transformers.py KIND`."""

import os

import torch
import transformers
from repeated_kinds import (
    FACTOR,
    IS_AGAIN,
    KIND,
    PER_STEP,
    Optimizer,
    Scaler,
    Scheduler,
    make_loader,
    plant,
    restored,
    set_own_rate,
)
from repeated_kinds import Model as Net
from torch.utils.data import DataLoader

from resilience_sdk.adapters.transformers import ResilienceCallback

given = make_loader(is_shared=True)


class Model(torch.nn.Module):
    """A model whose forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, rows):
        """Return the loss."""
        return {"loss": self.net(rows).square().mean() * FACTOR}

    def load_state_dict(self, state, *args, **options):
        """Make it anew, where that is asked for."""
        found = super().load_state_dict(state, *args, **options)
        restored(self.net)
        return found


class Planting(transformers.TrainerCallback):
    """Does what makes a step another one, and steps the scheduler of the script's own."""

    def on_train_begin(self, args, state, control, **_):
        """Set a rate of one's own."""
        set_own_rate(optimizer, scheduler)

    def on_step_begin(self, args, state, control, **_):
        """Plant."""
        plant(state.global_step, model.net)

    def on_step_end(self, args, state, control, **_):
        """Step it."""
        if KIND == "rate":
            scheduler.step()


class Trainer(transformers.Trainer):
    """A trainer with a sampler of the script's own."""

    def get_train_dataloader(self):
        """Return its loader."""
        if KIND in ("order", "batch", "shard"):
            return self.accelerator.prepare(DataLoader(given.dataset, 4, sampler=given.sampler, collate_fn=collate))
        return super().get_train_dataloader()


def collate(samples):
    """Return a batch with the name of the argument of `forward`."""
    return {"rows": torch.stack([sample[0] for sample in samples])}


model = Model()
optimizer = Optimizer(model.parameters())
scheduler = Scheduler(optimizer)
constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) if KIND == "rate" else scheduler
trainer = Trainer(
    model,
    transformers.TrainingArguments(
        output_dir=os.environ["RESILIENCE_RUN_DIR"] + "/trainer",
        max_steps=20 if KIND == "longer" and IS_AGAIN else 16,
        per_device_train_batch_size=2 if KIND == "batch size" and IS_AGAIN else 4,
        gradient_accumulation_steps=PER_STEP,
        dataloader_num_workers=2 if KIND == "any order" else 0,
        dataloader_in_order=KIND != "any order",
        save_strategy="steps",
        save_steps=5,
        remove_unused_columns=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    data_collator=collate,
    train_dataset=given.dataset,
    callbacks=[Planting(), ResilienceCallback()],
    optimizers=(optimizer, constant),
)
if KIND == "scaler":
    trainer.accelerator.scaler = Scaler()  # which it makes itself on a GPU alone
trainer.train()
