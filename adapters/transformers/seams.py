"""The sections of a training: hooks on the model and its optimizer, and methods of the trainer that are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience_sdk import straggler
from resilience_sdk.adapters._base import HookedSection
from resilience_sdk.adapters.transformers.tokens import Telling
from resilience_sdk.adapters.transformers.trainers import torch_optimizer


class Timed:
    """A method of a trainer with a section around it."""

    def __init__(self, method: Callable[..., Any], section: HookedSection) -> None:
        self._method = method
        self._section = section

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it; what it raises passes, and its time does not count then."""
        section = self._section
        section.begin()
        try:
            result = self._method(*args, **options)
        except BaseException:
            section.drop()
            raise
        section.end()
        return result


class Seams:
    """What is hung on a trainer for the time of one training."""

    def __init__(self, trainer: Any) -> None:
        """Hang it on, once the trainer has wrapped its model and made its optimizer."""
        self._trainer = trainer
        self._before: dict[str, Any] = {}
        self._attached: Any = None
        try:
            self._hang_on(trainer)
        except BaseException:
            self.detach()
            raise

    def _hang_on(self, trainer: Any) -> None:
        fetched = Timed(trainer.get_batch_samples, HookedSection("data", "io"))
        self.put("get_batch_samples", Telling(fetched, trainer.model))
        self.put("evaluate", Timed(trainer.evaluate, HookedSection("eval", "compute")))
        self._attached = straggler.attach(trainer.model_wrapped, torch_optimizer(trainer))

    def put(self, name: str, call: Callable[..., Any]) -> None:
        """Put `call` in the place of a method of the trainer."""
        own = vars(self._trainer)
        self._before.setdefault(name, own.get(name))
        own[name] = call

    def detach(self) -> None:
        """Leave the trainer and its model as they were. May be repeated."""
        own = vars(self._trainer)
        for name, before in self._before.items():
            if before is None:
                own.pop(name, None)
            else:
                own[name] = before
        self._before = {}
        if self._attached is not None:
            self._attached.detach()
