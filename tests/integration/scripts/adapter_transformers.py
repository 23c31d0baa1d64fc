"""The contract's training with the Trainer of Transformers: DDP, and `ResilienceCallback`."""

from __future__ import annotations

import os
from typing import Any

import contract_script as contract
import torch
import transformers
from torch import nn
from torch.utils.data import Subset

import resilience_sdk
from resilience_sdk.adapters.transformers import ResilienceCallback

CONTRACT = {"module": "transformers", "package": "transformers accelerate", "saves_in_background": False}

BATCH = 4
transformers.logging.set_verbosity_error()
args = contract.arguments()
torch.set_num_threads(1)
torch.manual_seed(0)


class Model(nn.Module):
    """The contract's network, as a Trainer wants it: it gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = contract.Net(args)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.net(inputs), targets)}


class Tells(transformers.TrainerCallback):
    """Tells where this attempt begins, and its steps; sees the optimizer before the adapter does."""

    steps: contract.Steps
    before: list[Any]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count."""
        self.steps = contract.Steps(state.global_step)
        self.steps.watch(optimizer)
        contract.prepared()
        self.before = contract.traces(optimizer)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with the names of the arguments of `forward`."""
    inputs, targets = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}


def hung() -> list[object]:
    """Return what the adapter may have hung on the trainer and the model."""
    hidden = [name for name in vars(trainer) if hasattr(type(trainer), name)]
    callbacks = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    return [hidden, callbacks, *contract.traces(model)]


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
tells = Tells()
trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        output_dir=os.environ.get("RESILIENCE_RUN_DIR", os.environ["TOLD"]) + "/trainer",
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=args.accumulate,
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=args.evaluate or None,
        per_device_eval_batch_size=BATCH,
        save_strategy="steps" if args.save else "no",
        save_steps=args.save or 1,
        save_total_limit=1,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    data_collator=collate,
    train_dataset=contract.Numbers(),
    eval_dataset=Subset(contract.Numbers(), range(2 * BATCH * contract.EVALUATED)),
    callbacks=[tells],
    optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
)
before = hung()
callback = ResilienceCallback()
callback.attach(trainer)
second = caught = None
try:
    ResilienceCallback().attach(trainer)
except resilience_sdk.ConfigError as error:
    second = f"ConfigError: {error}"
try:
    trainer.train()
except contract.StepError as error:
    caught = str(error)
callback.detach()
before += tells.before
after = hung() + contract.traces(optimizer)
contract.end(tells.steps, model, before=before, after=after, second=second, caught=caught)
