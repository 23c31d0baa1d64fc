"""What the Accelerate adapter counts, saves and loads, in one process: `accelerate_alone.py SCENARIO...`.

Each scenario holds by assertions, so that whole runs and resumed ones can be compared in one process.
"""

from __future__ import annotations

import functools
import json
import operator
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import resilience_sdk
from resilience_sdk import preemption
from resilience_sdk.adapters import accelerate as resilience
from resilience_sdk.adapters.accelerate.saves import FILE, UNFINISHED

SAMPLES, BATCH = 22, 4  # the last batch is short
EPOCH = 6


class Training:
    """A small training with Accelerate, begun anew as a new process would."""

    def __init__(
        self, kind: type[DataLoader] = DataLoader, *, scaler: torch.amp.GradScaler | None = None, **options: Any
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(3)
        self.accelerator = Accelerator(cpu=True, **options)
        self.accelerator.scaler = scaler  # Accelerate itself has one on devices alone
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = kind(TensorDataset(torch.arange(float(SAMPLES))[:, None]), batch_size=BATCH, shuffle=True)
        self.net, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            net, optimizer, loader, scheduler
        )
        self.seen: list[list[int]] = []

    def train(self, handle: resilience.Attached, steps: int, save_behind: tuple[int, ...] = ()) -> None:
        """Train until so many steps are complete; save by `save_state` behind some of them."""
        while handle.step < steps:
            for (batch,) in self.loader:
                self.seen.append([int(each) for each in batch])
                with self.accelerator.accumulate(self.net):
                    self.accelerator.backward(self.net(batch).square().mean())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if handle.step in save_behind:
                    self.accelerator.save_state()
                if handle.step >= steps:
                    break

    def weights(self) -> list[float]:
        """Return what has been learned, and what the scheduler remembers."""
        return [float(value) for value in self.net.state_dict().values()] + self.scheduler.get_last_lr()


def real_steps() -> None:
    """Two micro-batches make one step; samples are counted as the loader gives them."""
    training = Training(gradient_accumulation_steps=2)
    with resilience.attach(training.accelerator, save=False) as handle:
        training.train(handle, 4)
        assert (handle.step, handle.samples, handle.epoch) == (4, SAMPLES + 2 * BATCH, 1)


def one_step() -> None:
    """A training of a single step is saved when it is finished; one of none is not saved again."""
    training = Training()
    with resilience.attach(training.accelerator) as handle:
        training.train(handle, 1)
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000001"]
    manifest = Path("run/checkpoints/step-00000001/manifest.json")
    before = manifest.stat().st_mtime_ns
    again = Training()
    with resilience.attach(again.accelerator) as handle:
        assert handle.step == 1
    assert manifest.stat().st_mtime_ns == before
    assert again.weights() == training.weights()


def scaled() -> None:
    """A step that the scaler skips, since a gradient is infinite, is none."""
    training = Training(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    with resilience.attach(training.accelerator, save=False) as handle:
        training.train(handle, 3)
        assert len(training.seen) > 3
        assert training.accelerator.optimizer_step_was_skipped is False
        assert (handle.step, handle.samples) == (3, sum(map(len, training.seen)))


def resumed(config: DataLoaderConfiguration, kind: type[DataLoader] = DataLoader) -> None:
    """In the middle of an epoch, at its end, and in the second one: the rest is as without an interruption."""
    whole = Training(kind, dataloader_config=config)
    with resilience.attach(whole.accelerator, save=False) as handle:
        whole.train(handle, 3 * EPOCH)
    for steps in (4, EPOCH, EPOCH + 2):
        first = Training(kind, dataloader_config=config)
        handle = resilience.attach(first.accelerator, resume=False, checkpoint_every=1000)
        first.train(handle, steps)
        assert handle.save()
        handle.detach()
        torch.rand(7)
        second = Training(kind, dataloader_config=config)
        handle = resilience.attach(second.accelerator)
        assert (handle.step, handle.samples) == (steps, sum(map(len, first.seen)))
        assert second.accelerator.project_configuration.iteration == 0
        second.train(handle, 3 * EPOCH)
        handle.detach()
        assert first.seen + second.seen == whole.seen, (steps, first.seen, second.seen, whole.seen)
        assert second.weights() == whole.weights()


def resumed_by_indices() -> None:
    """With a plain loader and sampler."""
    resumed(DataLoaderConfiguration())


def resumed_by_seed() -> None:
    """With Accelerate's own sampler, whose order follows from the number of the pass."""
    resumed(DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5))


def resumed_by_loader() -> None:
    """With a loader that remembers its place: ours counts, also where the order is drawn anew for each epoch."""
    resumed(DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=5))
    forget_checkpoints()
    resumed(DataLoaderConfiguration(use_stateful_dataloader=True))
    forget_checkpoints()
    resumed(DataLoaderConfiguration(use_stateful_dataloader=True), StatefulDataLoader)


def forget_checkpoints() -> None:
    """Let the next training of this process begin at the beginning."""
    for place in Path("run/checkpoints").glob("step-*"):
        shutil.rmtree(place)


def numbered(place: Path, limit: int | None = None) -> dict[str, Any]:
    """Return the options of an accelerator that numbers its directories."""
    project = ProjectConfiguration(project_dir=str(place), automatic_checkpoint_naming=True, total_limit=limit)
    return {"project_config": project}


def own_saves() -> None:
    """The script's own directories are whole, counted on after a load, and as many as wanted."""
    place = Path("numbered")
    first = Training(**numbered(place, 2))
    with resilience.attach(first.accelerator, save=False) as handle:
        first.train(handle, 5, save_behind=(2, 4, 5))
    saved = place / "checkpoints" / "checkpoint_2"
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert json.loads((saved / FILE).read_text())["step"] == 5
    (place / "checkpoints" / "checkpoint_3").mkdir()
    (place / "checkpoints" / "checkpoint_3" / UNFINISHED).touch()
    second = Training(**numbered(place, 2))
    with resilience.attach(second.accelerator, save=False) as handle:
        second.accelerator.load_state()
        assert (handle.step, handle.samples) == (5, 5 * BATCH)
        assert second.accelerator.save_iteration == 3
        assert second.weights() == first.weights()
        second.train(handle, EPOCH)
    assert sorted(functools.reduce(operator.iadd, first.seen + second.seen, [])) == sorted(range(SAMPLES))
    assert "save_state" not in vars(second.accelerator)


def old_runs() -> None:
    """What was saved without us loads with us, and what was saved with us without us."""
    first = Training()
    first.accelerator.save_state("old")
    with resilience.attach(first.accelerator, save=False) as handle:
        first.train(handle, 3)
        assert first.accelerator.save_state("new") == Path("new").absolute()
        first.accelerator.save_state("new")  # into the same directory: replaced file by file
    assert not (Path("new") / UNFINISHED).exists()
    second = Training()
    second.accelerator.load_state("new")
    assert second.weights() == first.weights()
    with resilience.attach(second.accelerator, save=False) as handle:
        second.accelerator.load_state("old")
        assert handle.step == 0
        assert second.weights() != first.weights()


def failed_saves() -> None:
    """A save that fails leaves the directory as it was; one that was cut off is not loaded."""
    training = Training()
    with resilience.attach(training.accelerator, save=False) as handle:
        training.train(handle, 2)
        training.accelerator.save_state("kept")
        before = {path.name: path.read_bytes() for path in Path("kept").iterdir()}
        remove = training.accelerator.register_save_state_pre_hook(fail)
        training.train(handle, 3)
        with pytest.raises(resilience_sdk.CheckpointError, match="the disk is full"):
            training.accelerator.save_state("kept")
        remove.remove()
        assert {path.name: path.read_bytes() for path in Path("kept").iterdir()} == before
        (Path("kept") / UNFINISHED).touch()
        with pytest.raises(resilience_sdk.CheckpointError, match="half written"):
            training.accelerator.load_state("kept")


def fail(*_: object) -> None:
    """Fail in the middle of a save."""
    raise OSError("the disk is full")


def stopped() -> None:
    """A stop saves where Accelerate numbers the directories, and the next start goes on there."""
    first = Training(**numbered(Path("stopped")))
    handle = resilience.attach(first.accelerator, save=False)
    first.train(handle, 3)
    preemption.request("a test")
    with pytest.raises(resilience_sdk.Preempted, match="75"):
        first.train(handle, 1_000_000)
    handle.detach()
    assert handle.step >= 3
    second = Training(**numbered(Path("stopped")))
    second_handle = resilience.attach(second.accelerator, save=False)
    second.accelerator.load_state()
    assert second_handle.step == handle.step
    assert second.weights() == first.weights()
    second_handle.detach()


class Gan:
    """Two models that train in turns on each batch, `g` the attached one; without a loader a batch is of its step."""

    def __init__(self, turns: str, *, has_loader: bool) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(3)
        self.accelerator, self.turns = Accelerator(cpu=True), turns
        nets = [nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1)), nn.Linear(1, 1)]
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
        self.g, self.d, self.og, self.od = self.accelerator.prepare(*nets, *optimizers)
        self.loader = range(2)
        if has_loader:
            samples = TensorDataset(torch.arange(float(SAMPLES))[:, None] / SAMPLES)
            self.loader = self.accelerator.prepare(DataLoader(samples, batch_size=BATCH, shuffle=True))
        self.has_loader = has_loader

    def train(self, handle: resilience.Attached, steps: int, fails_at: int | None = None) -> list[float]:
        """Train until the attached model has made so many steps; return all weights."""
        while handle.step < steps:
            for item in self.loader:
                batch = item[0] if self.has_loader else torch.full((BATCH, 1), handle.step / SAMPLES)
                for turn in self.turns:
                    if handle.step == fails_at:
                        raise KeyboardInterrupt
                    optimizer = self.og if turn == "g" else self.od
                    optimizer.zero_grad()
                    made = self.g(batch)
                    self.accelerator.backward(self.d(made if turn == "g" else made.detach()).square().mean())
                    optimizer.step()
                if handle.step >= steps:
                    break
        return [value for net in (self.g, self.d) for each in net.parameters() for value in each.flatten().tolist()]


def in_turns(turns: str, *, has_loader: bool) -> None:
    """A save waits for the steps of all: what the others have still to make of a batch would be lost."""
    whole = Gan(turns, has_loader=has_loader)
    with resilience.attach(whole.accelerator, optimizer=whole.og, save=False) as handle:
        weights = whole.train(handle, 14)
    forget_checkpoints()
    first = Gan(turns, has_loader=has_loader)
    handle = resilience.attach(first.accelerator, optimizer=first.og, resume=False, checkpoint_every=4)
    with pytest.raises(KeyboardInterrupt):
        first.train(handle, 14, fails_at=10)
    handle.detach()
    second = Gan(turns, has_loader=has_loader)
    handle = resilience.attach(second.accelerator, optimizer=second.og, resume=True, checkpoint_every=1000)
    assert handle.step == 8
    assert second.train(handle, 14) == weights, turns
    handle.detach()


def generator_first() -> None:
    """Its forward comes again behind its step, with gradients."""
    in_turns("gd", has_loader=True)
    in_turns("gdd", has_loader=True)
    in_turns("dg", has_loader=True)


def generator_first_without_batches() -> None:
    """No batch is seen: the steps of the other optimizer are."""
    in_turns("gd", has_loader=False)
    in_turns("dg", has_loader=False)
    in_turns("gdd", has_loader=False)


class Other(GeneralTracker):
    """Somebody else's tracker."""

    name = "other"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Keep it."""
        self.logged.append(values)


def tracked() -> None:
    """What is logged is in the journal; the configuration too."""
    other = Other()
    training = Training(log_with=[resilience.tracker(), other])
    training.accelerator.init_trackers("a", config={"lr": 0.5})
    with resilience.attach(training.accelerator, save=False) as handle:
        training.train(handle, 2)
        training.accelerator.log({"loss": 0.25, "weights": training.net.weight}, step=handle.step)
    training.accelerator.end_training()
    lines = [json.loads(line) for path in Path("run/journal").glob("*.jsonl") for line in path.read_text().splitlines()]
    told = [(line["what"], line["step"], line["values"]) for line in lines if line["event"] == "metrics"]
    assert told == [("config", None, {"lr": 0.5}), ("log", 2, {"loss": 0.25})], told
    assert [set(values) for values in other.logged] == [{"loss", "weights"}]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in sys.argv[1:]:
        globals()[scenario]()
        print(f"{scenario} held")
