"""Trains with the Trainer, and tells all that a resume has to repeat: of each step, of each evaluation, of the end.

Its first attempt is killed at one step, or it is asked to leave behind one; what is started again resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_callback import ExportableState

from resilience_sdk import preemption
from resilience_sdk.adapters.transformers import ResilienceCallback

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, default=-1, help="the first attempt dies in this step")
parser.add_argument("--kill-in-evaluation", type=int, default=-1, help="or at the end of the evaluation of this step")
parser.add_argument("--leave-at", type=int, default=-1, help="the job is asked to leave in this step")
parser.add_argument("--evaluate-at", type=int, default=-1, help="a callback asks for an evaluation in this step")
parser.add_argument("--evaluate-at-stop", action="store_true", help="or in the step in which the job leaves")
parser.add_argument("--alone", action="store_true", help="without the SDK")
parser.add_argument("--stream", type=int, default=0, help="an iterable dataset without length, of so many samples")
parser.add_argument("--draws", action="store_true", help="the dataset draws random numbers, of all three kinds")
parser.add_argument("--samples", type=int, default=20)
parser.add_argument("--patience", type=int, default=0, help="with this EarlyStoppingCallback")
parser.add_argument("options", nargs="*", help="more arguments of the training, as name=JSON")
args = parser.parse_intermixed_args()
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
transformers.set_seed(0)

TIMES = ("runtime", "per_second")
rank = int(os.environ.get("RANK", "0"))
is_first = os.environ.get("RESILIENCE_INTERNAL_ATTEMPT", "0") == "0"


def tell(kind: str, **facts: Any) -> None:
    """Write down what was seen."""
    with open(f"{os.environ['TOLD']}/exact-{rank}", "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **facts}) + "\n")


def digest(*parts: bytes) -> str:
    """Return some letters that differ where the parts do."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def weights(model: Any) -> str:
    """Return a digest of all weights and buffers."""
    return digest(*(value.numpy().tobytes() for value in model.state_dict().values()))


def generators() -> str:
    """Return a digest of the three generators."""
    _, numbers, place, *_ = np.random.get_state()
    return digest(
        repr(random.getstate()).encode(),
        numbers.tobytes(),
        bytes([place % 251]),
        torch.get_rng_state().numpy().tobytes(),
    )


def sample(number: int) -> dict[str, torch.Tensor]:
    """Return one sample, with its number, and with noise where that was asked for."""
    value = torch.sin(torch.arange(8.0) + number)
    if args.draws:
        value = value + torch.rand(8) + random.random() + np.random.rand()
    return {"x": value, "labels": value.sum()[None] + number % 5, "number": torch.tensor(number)}


class Samples(Dataset):
    """Samples that are read by their number."""

    def __len__(self) -> int:
        return args.samples

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return sample(number)


class Stream(IterableDataset):
    """Samples one behind the other, nobody knows how many."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from map(sample, range(args.stream))


class Net(nn.Module):
    """A small network with dropout, that tells what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and prediction."""
        if self.training:
            self.seen.append([number.tolist(), digest(x.numpy().tobytes())])
        y = self.second(self.drop(torch.relu(self.first(x))))
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Tells(transformers.TrainerCallback):
    """Tells of each step; is where the process dies or the job is asked to leave."""

    def on_step_end(self, _: Any, state: Any, control: Any, **kept: Any) -> None:
        """Tell of it."""
        net, step = trainer.model, state.global_step
        seen, net.seen[:] = list(net.seen), []
        rate = kept["lr_scheduler"].get_last_lr()[0]
        tell("step", step=step, seen=seen, rate=rate, weights=weights(net), generators=generators())
        if step == args.leave_at:
            preemption.request("the test")
        if args.leave_at > 0:
            time.sleep(0.1)  # all leave 0.2 s of steps later
        if is_first and step == args.kill_at:
            os._exit(9)
        if step == args.evaluate_at or (args.evaluate_at_stop and step > args.leave_at):
            control.should_evaluate = True

    def on_evaluate(self, _: Any, state: Any, control: Any, metrics: Any, **__: Any) -> None:
        """Tell of it."""
        tell("evaluation", step=state.global_step, loss=metrics["eval_loss"])
        if is_first and state.global_step == args.kill_in_evaluation:
            os._exit(9)


class Last(transformers.TrainerCallback):
    """Comes last, and lets no evaluation be made but in the step in which the job leaves."""

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """See whether it leaves: nothing else saves."""
        if not control.should_save:
            control.should_evaluate = False


class Counts(transformers.TrainerCallback, ExportableState):
    """Keeps a state, of which one part is an argument."""

    def __init__(self, name: str, last: int = 0) -> None:
        self.name, self.last, self.sums = name, last, []

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """Count."""
        self.last = state.global_step
        self.sums.append(self.name)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {"name": self.name, "last": self.last}, "attributes": {"sums": self.sums}}


class Trainer(transformers.Trainer):
    """One whose evaluations draw a random number."""

    def prediction_step(self, *given: Any, **options: Any) -> Any:
        """Draw it."""
        torch.rand(1)
        return super().prediction_step(*given, **options)


options: dict[str, Any] = {
    "max_steps": 12,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.05,
    "logging_steps": 4,
    "save_steps": 3,
    "save_total_limit": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "remove_unused_columns": False,
    "label_names": ["labels"],
}
options |= {name: json.loads(value) for name, _, value in (one.partition("=") for one in args.options)}
counts = [Counts("a"), Counts("b")]
callbacks: list[Any] = [Tells(), *counts]
if args.patience:
    callbacks.append(transformers.EarlyStoppingCallback(args.patience))
if not args.alone:
    callbacks.append(ResilienceCallback())
if args.evaluate_at_stop:
    callbacks.append(Last())
trainer = Trainer(
    Net(),
    transformers.TrainingArguments(output_dir=os.environ["RESILIENCE_RUN_DIR"] + "/trainer", **options),
    train_dataset=Stream() if args.stream else Samples(),
    eval_dataset=[sample(number) for number in range(100, 110)],
    callbacks=callbacks,
)
result = trainer.train()
history = [
    {name: value for name, value in record.items() if not any(part in name for part in TIMES)}
    for record in trainer.state.log_history
]
tell(
    "end",
    step=trainer.state.global_step,
    weights=weights(trainer.model),
    history=history,
    loss=result.training_loss,
    best=os.path.basename(trainer.state.best_model_checkpoint or ""),
    metric=trainer.state.best_metric,
    counts=[[one.name, one.last, len(one.sums)] for one in counts],
    early=[one.early_stopping_patience_counter for one in callbacks if hasattr(one, "early_stopping_patience_counter")],
)
