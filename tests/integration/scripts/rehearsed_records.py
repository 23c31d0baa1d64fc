"""A `Trainer` with an average of its own, which it logs; with the argument `forgets` a resume begins it anew."""

import sys

import torch
import transformers
from transformers.trainer_callback import ExportableState

from resilience_sdk.adapters.transformers import ResilienceCallback


class Model(torch.nn.Module):
    """A model whose forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, rows):
        """Return the loss."""
        return {"loss": self.net(rows).square().mean()}


class Average(transformers.TrainerCallback, ExportableState):
    """The number of steps so far, as an average would be: nothing of the training goes by it."""

    def __init__(self, steps=0):
        self.steps = steps

    def state(self):
        return {"args": {"steps": 0 if "forgets" in sys.argv else self.steps}, "attributes": {}}

    def on_step_end(self, args, state, control, **_):
        self.steps += 1

    def on_log(self, args, state, control, logs=None, **_):
        if "average" not in logs and "loss" in logs:
            trainer.log({"average": float(self.steps)})


transformers.set_seed(3)
rows = [{"rows": row} for row in torch.rand(64, 2, generator=torch.Generator().manual_seed(8))]
trainer = transformers.Trainer(
    Model(),
    transformers.TrainingArguments(
        output_dir="trainer", max_steps=24, per_device_train_batch_size=2, save_steps=8, logging_steps=2,
        eval_strategy="steps", eval_steps=6, report_to="none", disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False, restore_callback_states_from_checkpoint=True,
    ),
    train_dataset=rows,
    eval_dataset=rows[:8],
    callbacks=[Average(), ResilienceCallback()],
)  # fmt: skip
trainer.train()
