"""Two trainings of `Trainer` in one process: the first is complete when the second is killed, and as it is resumed."""

import os
import signal

import torch
import transformers

from resilience_sdk.adapters.transformers import ResilienceCallback

IS_AGAIN = os.environ["RESILIENCE_INTERNAL_ATTEMPT"] != "0"


class Model(torch.nn.Module):
    """A model whose forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, rows):
        """Return the loss."""
        return {"loss": self.net(rows).square().mean()}


class Kill(transformers.TrainerCallback):
    """Kills the second training, once."""

    def on_step_begin(self, args, state, control, **_):
        """Kill."""
        if state.global_step == 8 and not IS_AGAIN:
            os.kill(os.getpid(), signal.SIGKILL)


def make(name, *callbacks):
    """Return a trainer with that seed of its order and directory."""
    rows = [{"rows": row} for row in torch.rand(32, 2, generator=torch.Generator().manual_seed(8))]
    arguments = transformers.TrainingArguments(
        output_dir=f"{os.environ['RESILIENCE_RUN_DIR']}/{name}", max_steps=12, per_device_train_batch_size=4,
        save_steps=5, data_seed=len(name), report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return transformers.Trainer(Model(), arguments, train_dataset=rows, callbacks=[*callbacks, ResilienceCallback()])


make("first").train()
second = make("second", Kill())
place = second.args.output_dir
second.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(place) if IS_AGAIN else None)
