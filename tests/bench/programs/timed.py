"""A training that writes down what it does and when: `timed.py OUT KIND [what=value ...]`.

Each line of `OUT/rank-R-PID.jsonl` is `[what, began, ended, step]` by the wall clock: `begin`, `step`, `data`,
`evaluation`, `checkpoint`, `resume` (from so many steps) and `end`. Steps sleep where a real one would compute.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANK = int(os.environ.get("RANK", "0"))


class Stamps:
    """What was done."""

    def __init__(self, out: Path) -> None:
        """Write a file of this process."""
        self._file = os.open(out / f"rank-{RANK}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.note("begin", time.time())

    def note(self, what: str, began: float, step: int = -1) -> None:
        """Write down what has just ended."""
        os.write(self._file, (json.dumps([what, began, time.time(), step]) + "\n").encode())

    @contextmanager
    def of(self, what: str, step: int = -1) -> Iterator[None]:
        """Write down what the block does."""
        began = time.time()
        yield
        self.note(what, began, step)


class Plan:
    """What is to be done, by `what=value`."""

    def __init__(self, words: list[str]) -> None:
        """Take the words of the command line."""
        told = dict(word.split("=") for word in words)
        self.steps = int(told.get("steps", "60"))
        self.step_s = float(told.get("step", "0.15"))
        self.data_s = float(told.get("data", "0"))
        self.eval_every, self.eval_s = int(told.get("eval_every", "0")), float(told.get("eval", "0"))
        self.save_every, self.save_s = int(told.get("save_every", "0")), float(told.get("save", "0"))
        self.behind_s = float(told.get("behind", "0"))

    def is_due(self, every: int, done: int) -> bool:
        """Tell whether something is due behind so many steps."""
        return every > 0 and done % every == 0


def works(seconds: float) -> None:
    """Use the processor for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def batches(plan: Plan, stamps: Stamps, first: int) -> Iterator[int]:
    """Yield the numbers of steps, each behind a wait."""
    for number in range(first, plan.steps):
        with stamps.of("data", number):
            time.sleep(plan.data_s)
        yield number


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that take their time."""

    def __init__(self, plan: Plan, stamps: Stamps | None) -> None:
        """Without stamps it is that of an evaluation."""
        self._plan, self._stamps = plan, stamps

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._stamps is not None:
            with self._stamps.of("data", index):
                time.sleep(self._plan.data_s)
        return torch.ones(4)


class Model(nn.Module):
    """A layer whose forward takes its time while it trains."""

    def __init__(self, plan: Plan) -> None:
        """Take what a step takes from the plan."""
        super().__init__()
        self.layer, self._plan = nn.Linear(4, 1), plan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        time.sleep(self._plan.step_s if torch.is_grad_enabled() else 0.05)
        return self.layer(x).sum() * 0.0


def primitives(plan: Plan, stamps: Stamps, out: Path) -> None:
    """A loop with the primitives, and a checkpoint of its own."""
    from resilience_sdk import heartbeat, straggler

    saved, number = out / "own.json", torch.zeros(1)
    first = json.loads(saved.read_text()) if saved.exists() else 0
    stamps.note("resume", time.time(), first)
    for step in straggler.iterate(batches(plan, stamps, first)):
        with stamps.of("step", step), heartbeat(step=step):
            time.sleep(plan.step_s)
            dist.all_reduce(number)
        _between(plan, stamps, step, lambda done: _save(saved, done, plan.save_s))


def _save(saved: Path, done: int, seconds: float) -> None:
    time.sleep(seconds)
    if RANK == 0:
        saved.with_suffix(".new").write_text(json.dumps(done))
        os.replace(saved.with_suffix(".new"), saved)


def _between(plan: Plan, stamps: Stamps, step: int, save: Any) -> None:
    from resilience_sdk import straggler

    if plan.is_due(plan.eval_every, step + 1):
        with stamps.of("evaluation", step), straggler.section("eval"):
            time.sleep(plan.eval_s)
    if save is not None and plan.is_due(plan.save_every, step + 1):
        with stamps.of("checkpoint", step), straggler.section("save", kind="io"):
            save(step + 1)


def run(plan: Plan, stamps: Stamps, out: Path) -> None:
    """`start_run`, with its checkpoints."""
    import resilience_sdk

    model = Model(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    number = torch.zeros(1)

    class Loader:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            for one in batches(plan, stamps, self.at):
                self.at = one + 1
                yield one

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader, told = Loader(), False
    state = {"model": model, "optimizer": optimizer, "data": loader}
    with resilience_sdk.start_run(state=state, checkpoint_every=plan.save_every or 10) as job:
        for step, _ in job.steps(loader):
            if not told:
                told = True
                stamps.note("resume", time.time(), step)
            with stamps.of("step", step):
                model(torch.ones(4)).backward()
                optimizer.step()
                dist.all_reduce(number)
            _between(plan, stamps, step, None)


def unchanged(plan: Plan, stamps: Stamps, out: Path) -> None:
    """A script that knows nothing of the SDK, saves by itself and evaluates."""
    model = Model(plan)
    optimizer, number = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(1)
    stamps.note("resume", time.time(), 0)
    for step in batches(plan, stamps, 0):
        with stamps.of("step", step):
            model(torch.ones(4)).backward()
            dist.all_reduce(number)
            optimizer.step()
        if plan.is_due(plan.eval_every, step + 1):
            with stamps.of("evaluation", step):
                works(plan.eval_s)
        if plan.is_due(plan.save_every, step + 1):
            with stamps.of("checkpoint", step):
                works(plan.save_s)
                torch.save(model.state_dict(), out / f"own-{RANK}.pt")


def accelerate(plan: Plan, stamps: Stamps, out: Path) -> None:
    """Accelerate, by its adapter."""
    from accelerate import Accelerator

    from resilience_sdk.adapters import accelerate as resilience

    accelerator = Accelerator(cpu=True)
    model = Model(plan)
    loader = torch.utils.data.DataLoader(Numbers(plan, stamps), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    number, done = torch.zeros(1), 0
    with resilience.attach(accelerator, checkpoint_every=plan.save_every or 1000) as handle:
        done = handle.step
        stamps.note("resume", time.time(), done)
        for batch in loader:
            began = time.time()
            accelerator.backward(model(batch))
            dist.all_reduce(number)
            optimizer.step()
            optimizer.zero_grad()
            stamps.note("step", began, done)
            done += 1
            _between(plan, stamps, done - 1, None)
            if done >= plan.steps:
                break


def lightning(plan: Plan, stamps: Stamps, out: Path) -> None:
    """Lightning, by its callback."""
    import lightning.pytorch as pl

    from resilience_sdk.adapters.lightning import ResilienceCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self._began = Model(plan), 0.0

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self._began = time.time()
            return self.model(batch)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            pass

        def on_train_batch_end(self, *_: Any) -> None:
            stamps.note("step", self._began, self.trainer.global_step - 1)

        def on_train_start(self) -> None:
            stamps.note("resume", time.time(), self.trainer.global_step)

        def on_validation_start(self) -> None:
            self._evaluates = time.time()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.model(batch)

        def on_validation_end(self) -> None:
            stamps.note("evaluation", self._evaluates)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(Numbers(plan, stamps), batch_size=1)
    checks = torch.utils.data.DataLoader(Numbers(plan, None), batch_size=1)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        callbacks=[ResilienceCallback(checkpoint_every=plan.save_every or 1000)], max_steps=plan.steps, devices=2,
        accelerator="cpu", strategy="ddp", num_sanity_val_steps=0, val_check_interval=plan.eval_every or 1000,
        limit_val_batches=int(plan.eval_s / 0.05), check_val_every_n_epoch=None, **off,
    )  # fmt: skip
    trainer.fit(Module(), loader, checks)


def transformers(plan: Plan, stamps: Stamps, out: Path) -> None:
    """The Trainer, by its callback."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resilience_sdk.adapters.transformers import ResilienceCallback

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(plan)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(x)}

    class Data(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    class Told(TrainerCallback):
        began = evaluates = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stamps.note("resume", time.time(), state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stamps.note("step", self.began, state.global_step - 1)

    told = Told()

    class Mine(Trainer):
        def training_step(self, *args: Any, **more: Any) -> Any:
            told.began = time.time()
            return super().training_step(*args, **more)

        def evaluate(self, *args: Any, **more: Any) -> Any:
            with stamps.of("evaluation"):
                return super().evaluate(*args, **more)

    evals = torch.utils.data.Subset(Data(plan, None), range(2 * max(1, int(plan.eval_s / 0.05))))
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"), max_steps=plan.steps, per_device_train_batch_size=1, use_cpu=True,
        per_device_eval_batch_size=1, report_to=[], logging_strategy="no", disable_tqdm=True, ddp_backend="gloo",
        save_strategy="steps" if plan.save_every else "no", save_steps=plan.save_every or 1000,
        eval_strategy="steps" if plan.eval_every else "no", eval_steps=plan.eval_every or 1000,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Mine(
        Net(), arguments, train_dataset=Data(plan, stamps), eval_dataset=evals, callbacks=[ResilienceCallback(), told],
        data_collator=lambda rows: {"x": torch.stack([row["x"] for row in rows])},
    )  # fmt: skip
    trainer.train()


def main() -> None:
    """Do what the command line says."""
    out, kind, plan = Path(sys.argv[1]), sys.argv[2], Plan(sys.argv[3:])
    stamps = Stamps(out)
    torch.set_num_threads(1)
    if kind in ("primitives", "run", "unchanged"):
        dist.init_process_group("gloo")
    globals()[kind](plan, stamps, out)
    time.sleep(plan.behind_s)
    stamps.note("end", time.time())


if __name__ == "__main__":
    main()
