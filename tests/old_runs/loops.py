"""Small loops, one for each way in: `loops.py WAY RUN_DIR [DIES_AT]` trains to its eighth step and saves every second.

They run with the version that has made the directories beside this file, and with the one of today: so they use what
both have. Each prints one line of JSON: with which step it begins and the weights there, and with which it ends. Where
it dies, behind that step, it prints the weights of the newest save.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY = 8, 2

way, run_dir = sys.argv[1], sys.argv[2]
dies_at = int(sys.argv[3]) if len(sys.argv) > 3 else None
told: dict[str, Any] = {}


def weights(model: Any) -> list[float]:
    """Return all weights."""
    return [float(value) for one in model.parameters() for value in one.detach().flatten()]


def begins(step: int, model: Any) -> None:
    """Note where the training begins."""
    told["first"], told["weights"] = step, weights(model)


def done(step: int, model: Any) -> None:
    """Note that so many steps are complete."""
    told["last"] = step
    if dies_at is not None and step % EVERY == 0:
        told["saved"], told["weights"] = step, weights(model)
    if step == dies_at:
        print(json.dumps(told), flush=True)
        os._exit(9)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def data() -> TensorDataset:
    """Return sixteen samples."""
    return TensorDataset(torch.arange(32.0).reshape(16, 2) / 32)


def train_step(model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    """Make one step."""
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def start_run() -> None:
    """Train by `start_run`."""
    import resilience_sdk

    model, optimizer = made()
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    state = {"model": model, "optimizer": optimizer}
    with resilience_sdk.start_run(run_dir, state=state, checkpoint_every=EVERY) as run:
        begins(run.step, model)
        for step, (batch,) in run.steps(loader, epochs=1):
            if step == dies_at:  # here its save is made
                done(step, model)
            train_step(model, optimizer, batch)
            run.values["seen"] = step
            if step + 1 != dies_at:
                done(step + 1, model)


def checkpointer() -> None:
    """Train by `attach` and a `Checkpointer`."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from resilience_sdk.adapters import pytorch
    from resilience_sdk.checkpoint import Checkpointer

    model, optimizer = made()
    loader = StatefulDataLoader(data(), batch_size=2, shuffle=True)
    saver = Checkpointer({"model": model, "optimizer": optimizer}, run_dir=run_dir, every=EVERY)
    saver.add_data("loader", loader)
    step = saver.resume()
    begins(step, model)
    with pytorch.attach(model, optimizer, loader, first_step=step):
        for (batch,) in loader:
            train_step(model, optimizer, batch)
            step += 1
            saver.maybe_save(step)
            done(step, model)


def lightning() -> None:
    """Train by Lightning's Trainer."""
    import lightning.pytorch as pl

    from resilience_sdk.adapters.lightning import ResilienceCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = made()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

        def on_train_start(self) -> None:
            begins(self.trainer.global_step, self)

        def on_train_batch_start(self, *_: Any) -> None:
            if self.trainer.global_step:
                done(self.trainer.global_step, self)

        def on_train_end(self) -> None:
            done(self.trainer.global_step, self)

    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    callback = ResilienceCallback(run_dir, checkpoint_every=EVERY)
    trainer = pl.Trainer(max_steps=STEPS, accelerator="cpu", devices=1, logger=False, callbacks=[callback], **options)
    trainer.fit(Module(), DataLoader(data(), batch_size=2, shuffle=True))


def transformers() -> None:
    """Train by the Trainer of Transformers, whose checkpoints are in its output directory."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resilience_sdk.adapters.transformers import ResilienceCallback, last_checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made()[0]

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Told(TrainerCallback):
        def on_train_begin(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
            begins(state.global_step, model)

        def on_step_begin(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step:
                done(state.global_step, model)

        def on_train_end(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
            done(state.global_step, model)

    arguments = TrainingArguments(
        output_dir=run_dir,
        max_steps=STEPS,
        save_steps=EVERY,
        save_total_limit=1,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        seed=0,
    )
    samples = [{"x": one} for (one,) in data()]
    callbacks = [ResilienceCallback(f"{run_dir}-run"), Told()]
    trainer = Trainer(Net(), arguments, train_dataset=samples, callbacks=callbacks)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=last_checkpoint(run_dir))


def accelerate() -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator

    from resilience_sdk.adapters import accelerate as resilience

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*made(), DataLoader(data(), batch_size=2, shuffle=True))
    with resilience.attach(accelerator, run_dir, checkpoint_every=EVERY) as handle:
        begins(handle.step, model)
        for (batch,) in loader:
            if handle.step:
                done(handle.step, model)
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        done(handle.step, model)


def deepspeed() -> None:
    """Train with DeepSpeed."""
    from cpu_deepspeed import deepspeed as framework

    from resilience_sdk.adapters import deepspeed as resilience

    alone_in_a_group(lambda: framework.init_distributed("gloo"))
    model, optimizer = made()
    engine, *_ = framework.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    with resilience.attach(engine, run_dir, loader=loader, checkpoint_every=EVERY) as handle:
        begins(handle.step, engine.module)
        for (batch,) in loader:
            if handle.step:
                done(handle.step, engine.module)
            engine.backward(engine(batch).square().mean())
            engine.step()
        done(handle.step, engine.module)


def megatron() -> None:
    """Train on `megatron.core`."""
    import cpu_megatron

    cpu_megatron.install()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    from resilience_sdk.adapters import megatron as resilience

    alone_in_a_group(lambda: torch.distributed.init_process_group("gloo"))
    parallel_state.initialize_model_parallel()
    assert dist_checkpointing
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.net, self.optimizer = made()

    model = Model()

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        model.optimizer.load_state_dict(state["optimizer"])

    def state(_is_loading: bool = False) -> dict[str, Any]:
        return {"model": model.sharded_state_dict(), "optimizer": model.optimizer.state_dict()}

    saver = resilience.checkpointer(state, load, run_dir=run_dir, every=EVERY)
    step = saver.resume()
    begins(step, model)
    with resilience.attach(config, model.optimizer, first_step=step) as handle:
        for (batch,) in list(DataLoader(data(), batch_size=2))[step:]:
            train_step(model.net, model.optimizer, batch)
            saver.maybe_save(handle.step)
            done(handle.step, model)


def alone_in_a_group(begin: Callable[[], object]) -> None:
    """Begin a process group of one."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    begin()


WAYS = (start_run, checkpointer, lightning, transformers, accelerate, deepspeed, megatron)

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "scripts"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {one.__name__: one for one in WAYS}[way]()
    print(json.dumps(told))
