"""What the loops of `tests.exact` share: data, a network, where a fault strikes, and what each step tells.

A loop is started with one argument, a JSON object: its options, and `faults`, a list of [moment, number]. A fault
strikes once, in whichever attempt first comes there, on the rank `victim`. What is told are lines of JSON,
`[component, key, value]`, in a file for each rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

options: dict[str, Any] = json.loads(sys.argv[1])
rank, ranks = (int(os.environ.get(name, str(other))) for name, other in (("RANK", 0), ("WORLD_SIZE", 1)))
alone: bool = options["alone"]
EPOCHS = 3
LENGTH: int = options["length"]
BATCH: int = options["batch"]  # of one rank
ACCUMULATE: int = options["accumulate"]
EVERY: int = options["every"]

HELD, COIN = torch.Generator().manual_seed(11 + rank), random.Random(13 + rank)
"""Generators that nobody but the network holds, of a loop in which they are `held`."""

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)
_folder = Path(os.environ["TOLD"])
_lines = open(_folder / f"rank-{rank}", "a", encoding="utf-8")  # noqa: SIM115 - open to the end, which may be a kill


def seed() -> None:
    """Seed the three generators, each rank its own."""
    for one in (random.seed, numpy.random.seed, torch.manual_seed):
        one(1 + rank)


def tell(component: str, key: Any, value: Any) -> None:
    """Tell one thing; it is there when this returns."""
    _lines.write(json.dumps([component, key, value]) + "\n")
    _lines.flush()


def digest(value: Any) -> str:
    """Return some letters that differ where anything does, to the last bit."""
    total = hashlib.sha256()
    _add(total, value)
    return total.hexdigest()[:12]


def _add(total: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, numpy.ndarray):
        total.update(value.tobytes())
    elif isinstance(value, dict):
        for name, one in value.items():
            total.update(repr(name).encode())
            _add(total, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(total, one)
    else:
        total.update(repr(value).encode())


def tell_generators(key: Any, **own: torch.Generator) -> None:
    """Tell the generators of the process, and some of the program's own."""
    tell("python", key, digest(random.getstate()))
    tell("numpy", key, digest(list(numpy.random.get_state())))
    tell("torch", key, digest(torch.get_rng_state()))
    if options.get("held"):
        own["held"] = HELD
    for name, one in own.items():
        tell("own generator", [key, name], digest(one.get_state()))


def tell_batch(key: Any, batch: torch.Tensor, component: str = "samples") -> None:
    """Tell which samples a batch has, and what was drawn for them."""
    tell(component, key, [round(number) for number in batch[:, 0].tolist()])
    tell("drawn for samples", [component, key], digest(batch))


tell("start", 0, options["start"])


# -- where faults strike

_asked: list[int] = []  # faults of this process, which has survived them


def reach(moment: str, number: int) -> None:
    """Strike, if that was asked for here."""
    for index, fault in enumerate(options["faults"]):
        if fault == [moment, number] and rank == options["victim"] and _is_first(index):
            tell("fault", index, fault)
            _asked.append(index)
            os.kill(os.getpid(), signal.SIGTERM if options["fault"] == "preempt" and not alone else signal.SIGKILL)
    if moment == "step" and _asked:
        time.sleep(0.25)  # as long as a stop takes to be agreed upon


def _is_first(index: int) -> bool:
    try:
        os.close(os.open(_folder / f"fault-{index}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class _Saves:
    """Strikes in a save, when a file is half written."""

    def __init__(self) -> None:
        self.step = 0
        self._save = torch.save
        torch.save = self

    def __call__(self, value: Any, file: Any, *given: Any, **named: Any) -> Any:
        if os.getpid() == _pid:
            reach("save", self.step)
        return self._save(value, file, *given, **named)


_pid = os.getpid()
saves = _Saves() if any(fault[0] == "save" for fault in options["faults"]) else None


def at_step(step: int) -> None:
    """A step of the loop is under way: `step` of them are complete."""
    if saves is not None:
        saves.step = step
    reach("step", step)


# -- data


def noisy(index: int) -> torch.Tensor:
    """Return a sample, with an augmentation of each kind of generator, unless data are to be `still`."""
    if options.get("still"):
        return torch.tensor([float(index), index % 3, index % 5, index % 7])
    return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()])


class Noisy(Dataset):
    """Samples that are read by their number."""

    def __init__(self, length: int = LENGTH, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return noisy(self.first + index)


class Stream(IterableDataset):
    """Samples one behind the other, nobody knows how many; each rank has every n-th."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(noisy, range(rank, LENGTH, ranks))


class StatefulStream(IterableDataset):
    """One that knows its place, and how often it was read."""

    def __init__(self) -> None:
        self.index = self.reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.index * ranks < LENGTH:
            self.index += 1
            yield noisy((self.index - 1) * ranks + rank)
        self.index = 0
        self.reads += 1

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"index": self.index, "reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.index, self.reads = state["index"], state["reads"]


class OwnOrder(Sampler):
    """Another order in each pass, drawn by a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(LENGTH), LENGTH))


class Net(nn.Module):
    """Two layers with dropout; where that is asked for, an average of batches, noise of generators that it holds."""

    def __init__(self) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(8)] if options.get("norm") else []
        self.layers = nn.Sequential(nn.Linear(4, 8), *norm, nn.Dropout(0.3), nn.Linear(8, 1))
        self.noise, self.coin = (HELD, COIN) if options.get("held") else (None, None)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        if self.training and self.noise is not None and self.coin is not None and self.coin.random() < 0.7:
            batch = batch + torch.rand((), generator=self.noise)
        return self.layers(batch / 10)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return (model(batch) - batch.mean(1, keepdim=True) / 5).square().mean()


def same_net() -> Net:
    """Return one with the same weights on all ranks."""
    torch.manual_seed(0)
    net = Net()
    seed()
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return the one that is asked for."""
    if options.get("optimizer") == "sgd":
        return torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the one that is asked for."""
    kind = options.get("schedule")
    if kind == "step":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if kind == "metric":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return its learning rate."""
    return float(optimizer.param_groups[0]["lr"])


class MicroBatches:
    """The numbers of micro-batches in a loop whose framework counts steps alone."""

    def __init__(self) -> None:
        self._micro, self._at = 0, -1

    def begin(self, step: int, epoch: int, batch: torch.Tensor) -> int:
        """Begin one of that step; return its number, over all attempts."""
        self._micro, self._at = (self._micro + 1, step) if step == self._at else (0, step)
        number = step * ACCUMULATE + self._micro
        at_step(step)
        if self._micro == 1:
            reach("window", step)
        tell("epoch", step, epoch)
        tell_batch(number, batch)
        return number


def evaluate(epoch: int, model: Any, net: Any) -> float:
    """Evaluate `model` by its `net`, with random numbers, and return the loss."""
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for index, batch in enumerate(DataLoader(Noisy(12, 200), 4)):
            if index == 1:
                reach("evaluation", epoch)
            total += loss_of(net, batch)
    model.train()
    tell("evaluations", epoch, total.item())
    return total.item()
