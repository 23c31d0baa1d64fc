"""Random numbers that the workers of a loader draw: those of a resume are other ones where their state is in no save.

What makes a batch of samples is gone around in the loader, so that each worker compares the generators of its process
with those that it began with. Of generators that the data hold themselves nobody knows.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

from resilience_sdk.checkpoint.generators import find_generators
from resilience_sdk.core.iterated_class import plain_class
from resilience_sdk.core.resume_limits import note

ALL_OF_FIRST, ONE_OF = 32, 16
"""Generators cost 40 us to read: at each of the first batches, then, as long as none draws, at one of so many."""
_OF_DATA = ("dataset", "collate_fn")


class DrawnInWorkers:
    """The two functions of a loader that its workers call, and whether the generators there have changed between them.

    Each call is one of the loader's own; nothing is drawn by it.
    """

    def __init__(self, loader: Any) -> None:
        """Go around those of `loader`, a `DataLoader`; raises `OSError` or `RuntimeError` without shared memory."""
        import torch

        self._flag = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._before: Any = None
        self._calls = 0
        self._loaders = 1
        """How many have put it in and not taken it out again."""
        self._collate: Callable[[Any], Any] = loader.collate_fn
        loader.collate_fn = self
        loader.worker_init_fn = _Begun(self, loader.worker_init_fn)

    @classmethod
    def put_in(cls, loader: Any) -> DrawnInWorkers | None:
        """Go around those of a loader, or of that below one of Accelerate's; None where that cannot be done."""
        from torch.utils.data import DataLoader

        base = getattr(loader, "base_dataloader", loader)
        if not isinstance(base, DataLoader):
            return None
        if isinstance(base.collate_fn, cls):
            base.collate_fn._loaders += 1
            return base.collate_fn
        try:
            return cls(base)
        except (OSError, RuntimeError, AttributeError, TypeError):  # no shared memory, or a class that refuses
            return None

    def take_out(self, loader: Any) -> None:
        """Give the loader its own back, unless somebody has put another one around it, or needs it still."""
        base = getattr(loader, "base_dataloader", loader)
        self._loaders -= 1
        if self._loaders:
            return
        if base.collate_fn is self:
            base.collate_fn = self._collate
        if isinstance(base.worker_init_fn, _Begun) and base.worker_init_fn.draws is self:
            base.worker_init_fn = base.worker_init_fn.plain

    @property
    def seen(self) -> bool:
        """Whether a worker has drawn, in any pass."""
        return bool(self._flag[0])

    def begins(self) -> None:
        """Take the generators as they are before the first sample. In a worker."""
        self._before = _generators()

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples. In a worker."""
        batch = self._collate(samples)
        self._calls += 1
        if not self._flag[0] and (self._calls <= ALL_OF_FIRST or not self._calls % ONE_OF):
            after = _generators()
            if self._before is not None and _differ(self._before, after):
                self._flag[0] = 1
            self._before = after
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._collate, name)


class _Begun:
    """What a worker calls first."""

    def __init__(self, draws: DrawnInWorkers, plain: Callable[[int], Any] | None) -> None:
        self.draws, self.plain = draws, plain

    def __call__(self, worker: int) -> None:
        """Do what the loader's own does."""
        if self.plain is not None:
            self.plain(worker)
        self.draws.begins()


class WatchedWorkers:
    """The workers of one loader whose draws a resume does not repeat; of the thread that trains."""

    def __init__(self, loader: Any) -> None:
        """Look into them from now on; where that cannot be done, it is said that they may draw."""
        from torch.utils.data import IterableDataset

        self._loader = weakref.ref(loader)
        self._kind = (
            "persistent_workers=True" if getattr(loader, "persistent_workers", False) else plain_class(loader).__name__
        )
        self._is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        self._draws: DrawnInWorkers | None = None
        has_own = any(name.partition(".")[0] in _OF_DATA for name in find_generators(loader))
        is_begun = getattr(loader, "_iterator", None) is not None  # its workers are there already
        if not has_own and not is_begun:
            self._draws = DrawnInWorkers.put_in(loader)
        if self._draws is None:
            self.may_draw()

    def are_of(self, loader: Any) -> bool:
        """Tell whether these are the workers of that loader."""
        return self._loader() is loader

    def capture(self) -> bool | None:
        """Return whether they have drawn, None if nobody knows; say it if they have."""
        if self._draws is None:
            return None
        if self._draws.seen:
            self._note()
        return self._draws.seen

    def resume(self, has_drawn: object) -> None:
        """Say it if they had drawn before the save; anything but True and False: nobody knows."""
        if has_drawn is True:
            self._note()
        elif has_drawn is not False:
            self.may_draw()

    def may_draw(self) -> None:
        """Say that they may."""
        self._note(" (where nothing is drawn there the resume is exact)")

    def _note(self, unless: str = "") -> None:
        means = "the samples are the same, but a random augmentation makes other pictures of them"
        if self._is_stream:
            means = "a random order or augmentation in them gives other samples"
        note(
            "augmentation in workers",
            f"random numbers that the workers of {self._kind} draw",
            means + unless,
            "draw from a generator that is seeded by epoch and index, or use torch's DataLoader with run.steps() and "
            "without persistent_workers, which is read again",
        )


def _generators() -> tuple[Any, ...]:
    import torch

    numpy = sys.modules.get("numpy.random")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.get_state(legacy=False)["state"]


def _differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    import torch

    if one[0] != other[0] or not torch.equal(one[1], other[1]):
        return True
    first, second = one[2], other[2]
    if first is None or second is None:
        return False
    return bool(first["pos"] != second["pos"] or (first["key"] != second["key"]).any())
