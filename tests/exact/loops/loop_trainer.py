"""A `Trainer` of Transformers, as docs/adapters/transformers.md writes it; alone with `resume_from_checkpoint`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import telling as t
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

o = t.options
transformers.logging.set_verbosity_error()
transformers.set_seed(0)
TIMES = ("runtime", "per_second")
under_way: list[Any] = [None]  # the epoch


def sample(number: int) -> dict[str, torch.Tensor]:
    """Return one sample."""
    return {"x": (values := t.noisy(number)), "labels": values.sum()[None] / 20}


class Samples(Dataset):
    """Samples that are read by their number."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return sample(self.first + number)


class Stream(IterableDataset):
    """Samples one behind the other, nobody knows how many."""

    def __iter__(self) -> Any:
        yield from map(sample, range(t.LENGTH))


class Net(t.Net):
    """One that tells what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return loss and prediction."""
        if self.training:
            self.given.append(x)
        y = super().forward(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


class Tells(transformers.TrainerCallback):
    """Tells of each step, evaluation and record; where faults strike."""

    def on_epoch_begin(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """See which one it is."""
        if o["loader"] != "stream":
            under_way[0] = math.floor(state.epoch + 1e-6)
        elif under_way[0] is None:  # it knows no length: by what was trained before, in epochs of 24
            under_way[0] = state.global_step * t.ACCUMULATE * t.BATCH * t.ranks // 24
        else:
            under_way[0] += 1

    def on_step_begin(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """A step is under way."""
        t.at_step(state.global_step)

    def on_substep_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """A window of accumulation is open."""
        t.reach("window", state.global_step)

    def on_step_end(self, _: Any, state: Any, control: Any, **kept: Any) -> None:
        """Tell of it."""
        step, given = state.global_step, list(net.given)
        net.given.clear()
        t.tell("epoch", step, under_way[0])
        t.tell_batch(step, torch.cat(given))
        t.tell("learning rates", step, t.rate_of(kept["optimizer"]))
        t.tell_generators(step)
        t.tell("weights", step, t.digest(list(net.parameters())))
        t.tell("optimizer and scaler", step, t.digest(kept["optimizer"].state_dict()["state"]))

    def on_epoch_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """Tell of it, where it is over: a trainer that stops within an epoch ends that, too."""
        epoch, rest = divmod(state.global_step * t.ACCUMULATE, 6)
        if rest == 0:
            t.tell_generators(f"epoch {epoch - 1}")
            t.reach("behind", epoch - 1)

    def on_evaluate(self, _: Any, state: Any, control: Any, metrics: Any, **__: Any) -> None:
        """Tell of it."""
        t.tell("evaluations", state.global_step, metrics["eval_loss"])
        t.tell("best markers", state.global_step, state.best_metric)

    def on_log(self, _: Any, state: Any, control: Any, logs: Any, **__: Any) -> None:
        """Tell of it."""
        logs = {name: value for name, value in logs.items() if not any(part in name for part in TIMES)}
        t.tell("log records", [state.global_step, sorted(logs)], logs)


class Counts(transformers.TrainerCallback, ExportableState):
    """Keeps a state, of which one part is an argument."""

    def __init__(self, name: str, last: int = 0) -> None:
        self.name, self.last, self.sums = name, last, []

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """Count."""
        self.last = state.global_step
        self.sums.append(self.name)
        t.tell("callbacks", [self.name, state.global_step], [self.last, len(self.sums)])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {"name": self.name, "last": self.last}, "attributes": {"sums": self.sums}}


class Trainer(transformers.Trainer):
    """One whose evaluations draw random numbers."""

    batches = 0

    def evaluate(self, *given: Any, **named: Any) -> Any:
        """Evaluate."""
        self.batches = 0
        return super().evaluate(*given, **named)

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        """Draw one."""
        torch.rand(1)
        self.batches += 1
        if self.batches == 2:
            t.reach("evaluation", (self.state.global_step - 1) * t.ACCUMULATE // 6)
        return super().prediction_step(*given, **named)


net = Net()
arguments: dict[str, Any] = {
    "num_train_epochs": t.EPOCHS,
    "per_device_train_batch_size": t.BATCH,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": t.ACCUMULATE,
    "learning_rate": 0.02,
    "logging_steps": 2,
    "save_steps": t.EVERY,
    "save_total_limit": 2,
    "eval_strategy": "epoch",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "remove_unused_columns": False,
    "label_names": ["labels"],
    "output_dir": f"{o['scratch']}/trainer",
}
if o["loader"] == "stream":
    arguments |= {"max_steps": 3 * 6 // t.ACCUMULATE}
arguments |= o["arguments"]
callbacks: list[Any] = [Tells(), Counts("a"), Counts("b")]
if o.get("patience"):
    callbacks.append(transformers.EarlyStoppingCallback(o["patience"]))
if not t.alone:
    from resilience_sdk.adapters.transformers import ResilienceCallback

    callbacks.append(ResilienceCallback())
trainer = Trainer(
    net,
    transformers.TrainingArguments(**arguments),
    train_dataset=Stream() if o["loader"] == "stream" else Samples(t.LENGTH),
    eval_dataset=Samples(10, 100),
    callbacks=callbacks,
)
if t.alone and Path(arguments["output_dir"]).is_dir() and get_last_checkpoint(arguments["output_dir"]):
    result = trainer.train(resume_from_checkpoint=True)
else:
    result = trainer.train()
history = [
    {name: value for name, value in record.items() if not any(part in name for part in TIMES)}
    for record in trainer.state.log_history
]
t.tell("log records", "history", history)
t.tell("losses", "end", result.training_loss)
t.tell("best markers", "end", [Path(trainer.state.best_model_checkpoint or "").name, trainer.state.best_metric])
t.tell("end", "weights", t.digest(list(net.parameters())))
t.tell_generators("end")
