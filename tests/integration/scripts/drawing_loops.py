"""Loops whose numbers come from generators that nothing but an object of the training holds.

`drawing_loops.py WAY [THING...]`: a loop of that way in. It tells what each step has drawn; `KILL_AT` names a step that
this process is killed behind, once.
"""

import functools
import importlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
told = Path(os.environ["TOLD"])
things = set(sys.argv[2:])
WORKERS = 2 if "workers" in things else 0
STEPS, SAMPLES, EVERY = 14, 20, 1 if "each" in things else 2


class Net(nn.Module):
    """Holds a generator of each kind, and draws from all in a step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
        self.helper = functools.partial(numpy.random.default_rng(3).normal)
        self.legacy = numpy.random.RandomState(4)
        self.tau = 1.0

    def forward(self, x):
        noise = torch.rand((), generator=self.torch).item() + self.python.random() + self.helper()
        self.drawn = noise + self.legacy.normal()
        if "beside" in things:
            self.tau *= 0.9
        return self.layer(x) * (1 + self.drawn)


class Data(Dataset):
    """Rows, with or without an augmentation of its own generator."""

    def __init__(self, length=SAMPLES):
        self.length, self.rng = length, numpy.random.default_rng(5)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        own = self.rng.random() if "augmented" in things else 0.0
        own += torch.rand(()).item() if "process" in things else 0.0
        return torch.tensor([float(index), own])


COLLATES = random.Random(6)


def collate(rows):
    """Mix rows by a generator of this module."""
    return {"x": torch.stack(rows) * (1 + COLLATES.random() if "collate" in things else 1)}


def tell(step, **facts):
    """Tell what a step was made of, and die behind it if it is the one."""
    rank = os.environ.get("RANK", "0")
    with (told / f"steps-{rank}").open("a") as file:
        print(json.dumps({"step": step, **facts}), file=file)
    mark = told / "killed"
    if step == int(os.environ.get("KILL_AT", "-1")) and not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)


def loaders():
    """Return the loader of the training, and that of its evaluations, which shuffles."""
    kind = DataLoader
    if "stateful" in things:
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    train = kind(Data(), batch_size=2, shuffle=True, collate_fn=collate, num_workers=WORKERS)
    own = torch.Generator().manual_seed(8) if "own" in things else None
    return train, DataLoader(Data(8), batch_size=2, shuffle=True, collate_fn=collate, generator=own)


def by_run(net, optimizer):
    from resilience_sdk import start_run

    train, _ = loaders()
    state = {"model": net, "optimizer": optimizer}
    with start_run(state=state, checkpoint_every=EVERY) as run:
        for step, batch in run.steps(train, max_steps=STEPS):
            tell(step, drawn=trained(net, optimizer, batch), x=batch["x"].tolist())


def trained(net, optimizer, batch):
    loss = net(batch["x"]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [net.drawn, loss.item()]


def by_attach(net, optimizer):
    from resilience_sdk.adapters import pytorch
    from resilience_sdk.checkpoint import Checkpointer

    train, _ = loaders()
    saver = Checkpointer({"model": net, "optimizer": optimizer}, every=EVERY)
    handle = pytorch.attach(net, optimizer, train, first_step=saver.resume())
    while handle.step < STEPS:
        for batch in train:
            tell(handle.step, drawn=trained(net, optimizer, batch), x=batch["x"].tolist())
            saver.maybe_save(handle.step)
            if handle.step == STEPS:
                break


def by_accelerate(net, optimizer):
    from accelerate import Accelerator

    from resilience_sdk.adapters import accelerate as resilience

    accelerator = Accelerator(cpu=True)
    net, optimizer, train, evaluated = accelerator.prepare(net, optimizer, *loaders())
    inner = accelerator.unwrap_model(net)
    with resilience.attach(accelerator, loader=train, checkpoint_every=EVERY) as handle:
        while handle.step < STEPS:
            for batch in train:
                step, loss = handle.step, net(batch["x"]).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                tell(step, drawn=[inner.drawn, loss.item()], x=batch["x"].tolist())
                if "evaluates" in things and step % 2 == 1:
                    tell(step + 100, x=[batch["x"].tolist() for batch in evaluated])
                if handle.step == STEPS:
                    break


def by_lightning(net, optimizer):
    import lightning.pytorch as pl

    from resilience_sdk.adapters.lightning import ResilienceCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.rng = net, random.Random(7)
            self.seen = []

        def training_step(self, batch, batch_idx):
            loss = self.net(batch["x"]).mean() * (1 + self.rng.random())
            drawn = [self.net.drawn, loss.item(), self.trainer.callbacks[-1].drawn]
            tell(self.global_step, drawn=drawn, x=batch["x"].tolist())
            return loss

        def validation_step(self, batch, batch_idx):
            self.seen.append(batch["x"].tolist())

        def on_validation_epoch_end(self):
            tell(self.global_step + 100, x=self.seen)
            self.seen = []

        def configure_optimizers(self):
            return optimizer

    class Drawing(pl.Callback):
        def __init__(self):
            self.rng, self.drawn = random.Random(8), 0.0

        def on_train_batch_start(self, *_):
            self.drawn = self.rng.random()

    train, evaluated = loaders()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = (
        {"val_check_interval": 2, "num_sanity_val_steps": 0} if "evaluates" in things else {"limit_val_batches": 0}
    )
    trainer = pl.Trainer(
        callbacks=[ResilienceCallback(checkpoint_every=EVERY), Drawing()],
        max_steps=STEPS,
        accelerator="cpu",
        enable_model_summary=False,
        check_val_every_n_epoch=None,
        **quiet,
        **options,
    )
    trainer.fit(Module(), train, [evaluated] if "evaluates" in things else None)


def by_trainer(net, optimizer):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resilience_sdk.adapters.transformers import ResilienceCallback

    class Own(Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.rng = random.Random(7)
            self.rows, self.buffer = 3, [0]
            self.other = None

        def compute_loss(self, model, inputs, **_):
            loss = model(inputs["x"]).mean()
            if model.training and "buffers" in things:
                self.other = self.other or iter(DataLoader(Data(40)))
                next(self.other)
                self.buffer.append(self.rows)
            if model.training:
                loss = loss * (1 + self.rng.random())
                drawn = [self.model.drawn, loss.item(), drawing.drawn]
                tell(self.state.global_step, drawn=drawn, x=inputs["x"].tolist())
            return loss

    class Drawing(TrainerCallback):
        def __init__(self):
            self.rng, self.drawn = random.Random(8), 0.0

        def on_step_begin(self, *_, **__):
            self.drawn = self.rng.random()

    drawing = Drawing()
    train, evaluated = loaders()
    arguments = TrainingArguments(
        str(told / "trainer"),
        report_to=[],
        max_steps=STEPS,
        save_steps=EVERY,
        per_device_train_batch_size=2,
        use_cpu=True,
        **{"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2} if "evaluates" in things else {},
        remove_unused_columns=False,
        dataloader_num_workers=WORKERS,
        disable_tqdm=True,
    )
    callbacks = [ResilienceCallback(), drawing]
    Own(
        net,
        arguments,
        data_collator=collate,
        train_dataset=train.dataset,
        eval_dataset=evaluated.dataset,
        callbacks=callbacks,
        optimizers=(optimizer, None),
    ).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    globals()[f"by_{sys.argv[1]}"](model, torch.optim.SGD(model.parameters(), 0.001))
