"""The moments between two batches of a fit at which it is saved and left, and how another process goes on from them.

`on_train_batch_end` of a callback is in the middle of a batch: callbacks behind it, the module's own hook, the record
for the loggers, a validation that is due and the end of the epoch are yet to come, and what they do would be lost. So
the loops' own steps are heard: what is due is done when the batch is over, or the epoch that it completes.

Where a stop leaves no time for the validation or the end of the epoch, they are owed: a resume does them first.

These are private names of Lightning's. Where one is missing, it is said, and a save is made between the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

from resilience_sdk.adapters._base import Patches
from resilience_sdk.adapters.lightning import epoch_starts, metrics
from resilience_sdk.adapters.lightning.loaders import TrainingData
from resilience_sdk.core.resume_limits import note

BATCH = "batch"
"""Behind a batch that is not the last one of its epoch, with all that belongs to it."""
OWES_EVALUATION = "owes evaluation"
"""Behind a batch, before what follows it: a validation, a scheduler by its metric."""
OWES_EPOCH_END = "owes epoch end"
"""Behind the last batch of an epoch and its validation, before the epoch's own end."""
EPOCH = "epoch"
"""Behind an epoch."""
CUT = "cut epoch"
"""Behind the end of a training that was to end within an epoch."""

_SEAMS = (
    ("epoch_loop", "advance"),
    ("epoch_loop", "on_advance_end"),
    ("epoch_loop", "on_run_start"),
    ("epoch_loop", "update_lr_schedulers"),
    ("epoch_loop", "_num_ready_batches_reached"),
    ("epoch_loop", "_should_check_val_fx"),
    ("epoch_loop", "val_loop"),
    ("epoch_loop", "automatic_optimization"),
    ("epoch_loop", "manual_optimization"),
    ("", "run"),
    ("", "on_run_start"),
    ("", "on_run_end"),
    ("", "load_state_dict"),
    ("", "setup_data"),
    ("", "reset"),
    ("", "on_advance_start"),
    ("", "on_advance_end"),
    ("", "_combined_loader"),
    ("", "_data_fetcher"),
    ("", "epoch_progress"),
    ("epoch_loop", "batch_progress"),
)


def missing_seams(trainer: Any) -> list[str]:
    """Return the names that a trainer's loops lack. Pure."""
    found = []
    fit_loop = getattr(trainer, "fit_loop", None)
    for owner, name in _SEAMS:
        loop = getattr(fit_loop, owner, None) if owner else fit_loop
        if not hasattr(loop, name):
            found.append(f"fit_loop.{owner + '.' if owner else ''}{name}")
    return found if hasattr(trainer.strategy, "process_dataloader") else [*found, "strategy.process_dataloader"]


def say_missing(missing: list[str]) -> None:
    """Say that this version has other loops."""
    note(
        "loops",
        "what the module and later callbacks do at the end of a batch, and the place in a plain DataLoader",
        f"this version of Lightning has no {', '.join(missing)}, so a save is made between the hooks of a batch",
        "use lightning 2.5 or newer, and put ResilienceCallback last",
    )


class Moments(Protocol):
    """Whoever saves and leaves."""

    was_finished: bool
    """Whether an earlier fit of the run directory has come to its end."""

    def is_leaving(self) -> bool:
        """Tell whether all ranks leave behind this batch."""
        ...

    def has_time_for(self, seconds: float | None) -> bool:
        """Tell whether something that took so long may come before the last save; None: not known. Collective."""
        ...

    def settle(self) -> None:
        """Save if it is time, or leave; all ranks are between the same batches. Collective."""
        ...

    def restore_random_numbers(self) -> None:
        """Set the generators as they were at the save."""
        ...


class Loops(Patches):
    """The loops of one fit; of the thread that trains, on each rank."""

    def __init__(self, trainer: Any, moments: Moments, *, has_data: bool) -> None:
        """Hear them. `has_data`: take the loaders, too."""
        super().__init__()
        self._trainer = trainer
        self._moments = moments
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self.moment = BATCH
        self._resumed: str | None = None
        self._own: Mapping[str, Any] = {}
        self._owes_evaluation = False
        self.is_evaluated = False
        """Set by whoever hears an evaluation begin."""
        self._evaluation_s: float | None = None
        self._epoch_end_s = 0.0
        """How long the longest of each took."""
        self._of_cut_epoch: dict[str, Any] | None = None
        self._max_steps: int | None = None
        self._lacks_metrics = False
        """Whether this epoch goes on from a checkpoint without any: of an earlier version, or of other ranks."""
        self._plain: dict[str, Any] = {
            "advance": self._epoch_loop.advance,
            "batch_end": self._epoch_loop.on_advance_end,
            "run_start": self._epoch_loop.on_run_start,
            "run": self._fit_loop.run,
            "load": self._fit_loop.load_state_dict,
            "reset": self._fit_loop.reset,
            "epoch_start": self._fit_loop.on_advance_start,
            "epoch_end": self._fit_loop.on_advance_end,
            "schedulers": self._epoch_loop.update_lr_schedulers,
        }
        self.data = TrainingData(trainer) if has_data else None
        self.replace(self._fit_loop, "run", self._run)
        self.replace(self._epoch_loop, "advance", self._advance)
        self.replace(self._epoch_loop, "on_advance_end", self._batch_ends)
        self.replace(self._epoch_loop, "on_run_start", self._batches_start)
        self.replace(self._epoch_loop, "update_lr_schedulers", self._update_schedulers)
        self.replace(self._fit_loop, "load_state_dict", self._load)
        self.replace(self._fit_loop, "reset", self._reset)
        self.replace(self._fit_loop, "on_advance_start", self._epoch_starts)
        self.replace(self._fit_loop, "on_advance_end", self._epoch_ends)

    def detach(self) -> None:
        """Leave the trainer as it was. May be repeated."""
        super().detach()
        if self.data is not None:
            self.data.detach()

    # -- what a checkpoint holds of it

    def mark(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        return {"moment": self.moment}

    def capture(self) -> dict[str, Any]:
        """Return what is this rank's own."""
        data = {} if self.data is None else self.data.capture()
        of_epoch = self._of_cut_epoch if self.moment == CUT else None
        return {**self.mark(), "data": data, "metrics": of_epoch or metrics.capture(self._trainer)}

    def resume(self, checkpoint: dict[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from what was saved. `own`: what `capture` returned; None: a version wrote it that had none.

        Before Lightning restores its loops of `checkpoint`, which is changed.
        """
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        if "epoch_progress" not in loops or "epoch_loop.batch_progress" not in loops:
            return
        # Without the loaders Lightning restores them itself.
        loaders = None if self.data is None else loops.get("state_dict", {}).pop("combined_loader", None)
        if own is None:
            own = _earlier(loops, loaders)
        elif "data" not in own:  # of another number of ranks
            own = {**own, "data": {"earlier": list(loaders or ())}}
        self._resumed, self._own = str(own["moment"]), own
        if self._resumed == CUT:
            _take_back_epoch(loops)
            self._resumed = BATCH
        if self.data is not None:
            self.data.hold(own.get("data", {}))

    # -- the loops

    def _load(self, *args: Any, **options: Any) -> None:
        self._plain["load"](*args, **options)
        if self._resumed == EPOCH:
            # It tells a trainer that resumes behind an epoch to make no sanity check, as within an epoch.
            self._epoch_loop.val_loop._restarting = True

    def _run(self) -> None:
        """Where all steps are made, and the training has not come to its end, make the rest of it.

        Lightning sees that nothing is left to train, and would leave out what is to follow: a validation, the end of
        the epoch, `on_train_end`.
        """
        loop, is_owed = self._fit_loop, self._resumed is not None and not self._moments.was_finished
        if not (is_owed and self._is_complete()):
            self._plain["run"]()
        elif self._resumed == EPOCH:
            loop.setup_data()
            loop.reset()
            loop.on_run_start()
            loop.on_run_end()
        else:
            self._max_steps, self._epoch_loop.max_steps = self._epoch_loop.max_steps, self._epoch_loop.global_step + 1
            self._plain["run"]()

    def _reset(self) -> None:
        if self._resumed == EPOCH:
            self._set_restarting(False)
        self._plain["reset"]()

    def _update_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if update_plateau_schedulers and self._lacks_metrics and not self._has_monitored(interval):
            note(
                "plateau",
                "a step of ReduceLROnPlateau",
                "the checkpoint has no value of the metric that it goes by",
                "nothing is to be done: it is stepped from the next epoch on",
            )
            return
        self._plain["schedulers"](interval, update_plateau_schedulers)

    def _has_monitored(self, interval: str) -> bool:
        mine = [
            each for each in self._trainer.lr_scheduler_configs if each.reduce_on_plateau and each.interval == interval
        ]
        return all(each.monitor in self._trainer.callback_metrics for each in mine)

    def _epoch_starts(self) -> None:
        if self._resumed == EPOCH:
            self._moments.restore_random_numbers()
            metrics.restore(self._trainer, self._own.get("metrics", {}), self)
            if self.data is not None:
                self.data.before_epoch()
        self._plain["epoch_start"]()
        if self._resumed not in (None, EPOCH):
            epoch_starts.go_on(self._trainer)

    def _batches_start(self, fetcher: Any) -> None:
        self._plain["run_start"](fetcher)
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        if self._max_steps is not None:
            self._epoch_loop.max_steps, self._max_steps = self._max_steps, None
        own, self._own = self._own, {}
        self._lacks_metrics = not own.get("metrics")
        if resumed == EPOCH:
            if self.data is not None:
                self.data.begin_epoch(fetcher)
            else:
                iter(fetcher)  # Lightning has given it what was left of the epoch before: nothing
            return
        if self.data is not None:
            if self._epoch_loop._num_ready_batches_reached():
                self.data.skip_epoch()
            else:
                self.data.go_on(fetcher, self._epoch_loop.batch_progress.current.ready)
        self._moments.restore_random_numbers()
        metrics.restore(self._trainer, own.get("metrics", {}), self)
        if resumed == OWES_EVALUATION:
            self._owes_evaluation = True  # the loop is not done as long as it restarts
        else:
            self._set_restarting(False)

    def _set_restarting(self, value: bool) -> None:
        """What Lightning would do in a loop that restarts was done by us, or is to be done as in one that does not."""
        loops = (self._fit_loop, self._epoch_loop, self._epoch_loop.val_loop)
        for loop in (*loops, self._epoch_loop.automatic_optimization, self._epoch_loop.manual_optimization):
            loop._restarting = value

    def _advance(self, fetcher: Any) -> None:
        if self._owes_evaluation:
            self._owes_evaluation = False
            self._set_restarting(False)
            return
        self._plain["advance"](fetcher)
        is_due = self._moments.is_leaving() and self._epoch_loop._should_check_val_fx(fetcher)
        if is_due and not self._moments.has_time_for(self._evaluation_s):
            self._settle(OWES_EVALUATION)

    def _batch_ends(self, fetcher: Any) -> None:
        began, self.is_evaluated = monotonic(), False
        self._plain["batch_end"](fetcher)
        if self.is_evaluated:
            self._evaluation_s = max(self._evaluation_s or 0.0, monotonic() - began)
        if not self._epoch_loop._num_ready_batches_reached():
            self._settle(BATCH)
        elif self._moments.is_leaving() and not self._moments.has_time_for(self._epoch_end_s):
            self._settle(OWES_EPOCH_END)

    def _epoch_ends(self) -> None:
        began, is_whole = monotonic(), self._epoch_loop._num_ready_batches_reached()
        self._of_cut_epoch = None if is_whole else metrics.capture(self._trainer)
        self._plain["epoch_end"]()
        self._lacks_metrics = False
        self._epoch_end_s = max(self._epoch_end_s, monotonic() - began)
        self.moment = EPOCH if is_whole else CUT
        if not (self._moments.is_leaving() and self._is_complete()):  # then it is the end that saves
            self._moments.settle()

    def _is_complete(self) -> bool:
        steps, epochs = self._epoch_loop.max_steps, self._fit_loop.max_epochs
        is_enough = 0 <= steps <= self._epoch_loop.global_step
        return is_enough or (epochs is not None and 0 <= epochs <= self._fit_loop.epoch_progress.current.processed)

    def _settle(self, moment: str) -> None:
        self.moment = moment
        self._moments.settle()


def _earlier(loops: dict[str, Any], loaders: Any) -> dict[str, Any]:
    """Return where a checkpoint of an earlier version was made, and let its counts say so: behind the hooks.

    Behind the last batch of an epoch it has no metrics, without which the epoch cannot be ended: the next one is next.
    """
    progress, epoch = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    is_within = progress["total"]["completed"] < progress["total"]["processed"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
    is_last = bool(progress["is_last_batch"])
    if is_within and is_last:
        for counts in (epoch["total"], epoch["current"]):
            counts["processed"] = counts["completed"] = counts["started"]
        state = loops.get("epoch_loop.state_dict", {})
        if "_batches_that_stepped" in state:
            state["_batches_that_stepped"] += 1
        note(
            "earlier version",
            "the validation and the end of the epoch behind which an earlier version has saved",
            "metrics of that epoch are not in its checkpoints",
            "nothing is to be done: those of this version have them",
        )
    moment = EPOCH if is_last else OWES_EVALUATION if is_within else CUT
    return {"moment": moment, "data": {"earlier": list(loaders or ())}}


def _take_back_epoch(loops: dict[str, Any]) -> None:
    """Let an epoch be open that counts as complete because the training was to end within it."""
    for counts in loops["epoch_progress"].values():
        counts["processed"] -= 1
        counts["completed"] -= 1
