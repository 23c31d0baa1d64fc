"""One process that trains with the Trainer again and again, in all kinds of ways, and prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import torch
import transformers

from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters.transformers import ResilienceCallback, last_checkpoint
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.page_reader import PageReader

RUN_DIR = os.environ["RESILIENCE_RUN_DIR"]
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
DATA = [{"inputs": torch.ones(2) * number} for number in range(64)]


class Model(torch.nn.Module):
    """A layer that gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.layer(inputs).square().mean()}


class Counts(transformers.TrainerCallback):
    """Counts the steps that are really made, and raises at one of them."""

    def __init__(self, raise_at: int = -1) -> None:
        self.steps, self._raise_at = 0, raise_at

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count it."""
        self.steps += 1
        if self.steps == self._raise_at:
            raise ValueError("this step is bad")


def trainer(place: str, steps: int, *callbacks: Any) -> transformers.Trainer:
    """Return a trainer that saves under `place`."""
    args = transformers.TrainingArguments(
        output_dir=f"{RUN_DIR}/{place}",
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=5,
        remove_unused_columns=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return transformers.Trainer(
        Model(), args, train_dataset=DATA, eval_dataset=DATA[:8], callbacks=[ResilienceCallback(), *callbacks]
    )


def held() -> dict[str, int]:
    """Return what the process holds."""
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def still_open() -> list[str]:
    """Return the sections that are open on this rank's page."""
    recorder = lookup.recorder()
    assert recorder is not None
    reader = PageReader(recorder.page.path)
    try:
        return [section.name for lane in reader.snapshot().lanes for section in lane.stack]
    finally:
        reader.close()


seen: dict[str, Any] = {}
counts = Counts()
first = trainer("first", 10, counts)
first.train()
seen["first"] = {"steps": counts.steps, "finished": os.path.exists(f"{RUN_DIR}/finished")}

counts = Counts()
again = trainer("first", 10, counts)
again.train(resume_from_checkpoint=True)
seen["complete"] = {"steps": counts.steps, "step": again.state.global_step}

counts = Counts(raise_at=3)
raising = trainer("first", 20, counts)
try:
    raising.train(resume_from_checkpoint=last_checkpoint(f"{RUN_DIR}/first"))
except ValueError as error:
    seen["raised"] = {
        "error": str(error),
        "open": still_open(),
        "hidden": sorted({*vars(raising)} & {*dir(type(raising))}),
    }

other = trainer("other", 5)
other.train()
seen["other"] = {"step": other.state.global_step, "metrics": sorted(other.evaluate()), "open": still_open()}

model = torch.nn.Linear(1, 1)
with pytorch.attach(model, torch.optim.SGD(model.parameters())):
    try:
        trainer("other", 5).train()
    except ConfigError as error:
        seen["second"] = str(error)

for number in range(12):
    trainer("other", 5).train()
    if number == 1:
        seen["before"] = held()
seen["after"] = held()
print(json.dumps(seen))
