"""The sections of a fit: `fwd`, `bwd`, `comm_wait` and `optim` by hooks, `data` and `checkpoint` by the profiler.

Lightning asks its profiler around everything it does. A delegate in the profiler's place hears where it waits for
data and where it saves; the user's own profiler hears all that it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from resilience_sdk import straggler
from resilience_sdk.adapters._base import HookedSection
from resilience_sdk.console import say_once

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
SAVE = "save_checkpoint"


class HearingProfiler:
    """A profiler that tells `data` and `checkpoint` of what it is asked to profile, and hands all on to `inner`."""

    def __init__(self, inner: Any, data: HookedSection, checkpoint: HookedSection) -> None:
        self.inner = inner
        self.before_fetch: Callable[[], None] | None = None
        """Called once, before the next batch is fetched."""
        self._sections = {FETCH: data, SAVE: checkpoint}
        self.profile = self._profile if type(inner).__name__ != "PassThroughProfiler" else self._profile_quickly

    def start(self, action_name: str) -> None:
        """Begin an action."""
        if action_name in self._sections:
            if action_name == FETCH and self.before_fetch is not None:
                before_fetch, self.before_fetch = self.before_fetch, None
                before_fetch()
            self._sections[action_name].begin()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """End an action."""
        self.inner.stop(action_name)
        if action_name in self._sections:
            self._sections[action_name].end()

    def _profile(self, action_name: str) -> AbstractContextManager[Any]:
        if action_name in self._sections:
            return self._within(action_name)
        found: AbstractContextManager[Any] = self.inner.profile(action_name)
        return found

    def _profile_quickly(self, action_name: str) -> AbstractContextManager[Any]:
        """Return the same for a profiler that does nothing."""
        return self._within(action_name) if action_name in self._sections else _NOTHING

    @contextmanager
    def _within(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()


class FitSections:
    """What is hung on a trainer for the time of one fit."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.data, self.eval = HookedSection("data", "io"), HookedSection("eval", "compute")
        self._checkpoint = HookedSection("checkpoint", "io")
        self.profiler = HearingProfiler(trainer.profiler, self.data, self._checkpoint)
        self._attached: Any = None
        self._strategy: Any = None
        trainer.profiler = self.profiler

    def attach(self, module: Any) -> None:
        """Time the steps of the model as the strategy has wrapped it, which it has when the training starts."""
        strategy = self._trainer.strategy
        if not hasattr(strategy, "training_step"):
            say_once("lightning step", "fwd and bwd are not timed: this version's strategies have no training_step")
            return
        is_automatic = bool(module.automatic_optimization)
        # In manual optimization the backward is inside of the training step: what the module calls itself is timed.
        self._attached = straggler.attach(strategy.model if is_automatic else module)
        if is_automatic:
            self._strategy = strategy
            strategy.training_step = self._attached.around(strategy.training_step)

    def drop(self) -> None:
        """Close what an exception has left open."""
        for section in (self.data, self.eval, self._checkpoint):
            section.drop()

    def detach(self) -> None:
        """Leave the trainer as it was. May be repeated."""
        self.drop()
        if self._trainer.profiler is self.profiler:
            self._trainer.profiler = self.profiler.inner
        if self._strategy is not None:
            vars(self._strategy).pop("training_step", None)
            self._strategy = None
        if self._attached is not None:
            self._attached.detach()
            self._attached = None
