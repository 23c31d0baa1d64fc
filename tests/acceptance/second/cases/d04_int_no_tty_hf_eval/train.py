"""HF Trainer with a slow evaluation."""
import time

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import told
from resilience_sdk.adapters.transformers import ResilienceCallback

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = told.new_model()

    def forward(self, index=None, labels=None):
        return self.net(index)


class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        got, targets = told.batch(self.state.global_step)
        loss = nn.functional.mse_loss(model(index=got), targets)
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        told.tell("eval", step=self.state.global_step)
        time.sleep(told.pace("eval", 1.0))
        return torch.zeros(()), None, None


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(told.pace("step", 0.2))
        told.did(state.global_step - 1)


def data(count):
    return [{"index": torch.zeros(6, dtype=torch.float64), "labels": torch.zeros(1, dtype=torch.float64)} for _ in range(count)]


def main():
    told.up()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=told.LR)
    trainer = Mine(
        model,
        TrainingArguments(
            output_dir=told.pace("output_dir", "output"), max_steps=told.total(), per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True,
            eval_strategy="steps" if told.pace("eval_steps", 6) else "no", eval_steps=told.pace("eval_steps", 6) or None,
            save_strategy="steps", save_steps=told.pace("save_steps", 5), max_grad_norm=0.0, report_to=[], disable_tqdm=True,
            logging_steps=1000, dataloader_num_workers=0, remove_unused_columns=False,
        ),
        train_dataset=data(400),
        eval_dataset=data(60),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[Tell(), ResilienceCallback()],
    )
    trainer.train()
    told.final(model, trainer.state.global_step)


if __name__ == "__main__":
    main()
