"""One fit: what a callback of ours does from the setup of a trainer to its teardown, and its checkpoints.

Lightning installs a handler of SIGTERM when a training starts, which calls a collective inside the handler. The rank
that got the signal waits there for the others, and they wait for it in their backward: with more than one rank most
runs never end. So ours replaces it, before the first step; what was there before Lightning is chained as ever.

Lightning asks its profiler around everything it does. A delegate in the profiler's place hears where it waits for
data and where it saves; the user's own profiler hears all that it did before.

Checkpoints are saved and loaded by the trainer's own means, on all ranks, never into a deadlock.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from resilience_sdk import preemption, straggler
from resilience_sdk.adapters._base import (
    EvaluationBeat,
    HookedSection,
    Patches,
    StepBeat,
    StepLoss,
    checkpointer,
    errors_kept,
    say_left_out,
    say_not_copied,
)
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.manifest import SHARDED
from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.core.console import say, say_once
from resilience_sdk.errors import CheckpointError, ConfigError, Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import finish, reopen
from resilience_sdk.rank.checkpoints import fits, save_at_stop, say_how_to_resume
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.kernels import sampling_interval

BEAT = "heartbeat"
SECTIONS = "sections"
PREEMPTION = "preemption"
CHECKPOINT = "checkpoint"
FINISH = "finished flag"
NUMERICS = "look at losses"
REPORT = "straggler reports"

_SHARED = frozenset({SECTIONS})  # one of those that ask for it does it for all


def role_of(callback: Any, callbacks: Sequence[Any]) -> frozenset[str]:
    """Return what `callback` does beside the others: nothing, where it came by itself and somebody asked for another.

    Raises:
        ConfigError: Two of them were asked for the same.
    """
    ours = [other for other in callbacks if hasattr(other, "duties")]
    asked = [other for other in ours if not other.is_automatic] or ours[:1]
    if callback not in asked:
        return frozenset()
    mine = set(callback.duties)
    for other in asked:
        if other is callback:
            continue
        if clash := sorted(mine & other.duties - _SHARED):
            names = f"{type(callback).__name__} and {type(other).__name__}"
            raise ConfigError(
                f"Trainer(callbacks=...) has {names}, and both do the {clash[0]}: remove one of them, only one can"
            )
        if asked.index(other) < asked.index(callback):
            mine -= other.duties
    if callback.stops_for_stragglers and not any(PREEMPTION in other.duties for other in asked):
        mine.add(PREEMPTION)
    return frozenset(mine)


def is_complete(trainer: Any, *, has_ended: bool) -> bool:
    """Tell whether nothing is left to do: a time budget (`max_time`, `Timer`) that is spent leaves something.

    A fit that finds its steps or epochs done already is complete; so is one that an `EarlyStopping` has ended. One
    whose training has not come to its end (`has_ended`) was only begun, as `Tuner.lr_find` does.
    """
    if _reached(trainer.global_step, trainer.max_steps) or _reached(trainer.current_epoch, trainer.max_epochs):
        return True
    return has_ended and not any(_is_spent(callback) for callback in trainer.callbacks)


def _reached(count: int, most: int | None) -> bool:
    return most is not None and 0 <= most <= count


def _is_spent(callback: Any) -> bool:
    remaining = getattr(callback, "time_remaining", None)
    left_s = remaining() if callable(remaining) else None
    return left_s is not None and left_s <= 0


FETCH = "[_TrainingEpochLoop].train_dataloader_next"
SAVE = "save_checkpoint"
_NOTHING = nullcontext()


class HearingProfiler:
    """A profiler that tells `data` and `checkpoint` of what it is asked to profile, and hands all on to `inner`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.before_fetch: Callable[[], None] | None = None
        """Called once, before the next batch is fetched."""
        self.sections = {FETCH: HookedSection("data", "io"), SAVE: HookedSection("checkpoint", "io")}
        self._is_silent = type(inner).__name__ == "PassThroughProfiler"

    def start(self, action_name: str) -> None:
        """Begin an action."""
        if action_name in self.sections:
            if action_name == FETCH and self.before_fetch is not None:
                before_fetch, self.before_fetch = self.before_fetch, None
                before_fetch()
            self.sections[action_name].begin()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """End an action."""
        self.inner.stop(action_name)
        if action_name in self.sections:
            self.sections[action_name].end()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return what is around an action."""
        if action_name in self.sections:
            return self._within(action_name)
        found: AbstractContextManager[Any] = _NOTHING if self._is_silent else self.inner.profile(action_name)
        return found

    @contextmanager
    def _within(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def kernels_every(callbacks: Sequence[Any]) -> float | None:
    """Return how often callbacks of ours want kernels to be timed, in seconds; None: none does. Pure."""
    wanted = [getattr(callback, "kernels_every", None) for callback in callbacks if hasattr(callback, "duties")]
    return min((every_s for every_s in wanted if every_s is not None), default=None)


class FitSections(Patches):
    """What is hung on a trainer for the time of one fit."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._kernels_every = kernels_every(trainer.callbacks)
        self.eval = HookedSection("eval", "compute")
        self.profiler = HearingProfiler(trainer.profiler)
        self.replace(trainer, "profiler", self.profiler)

    def attach(self, module: Any) -> None:
        """Time the steps of the model as the strategy has wrapped it, which it has when the training starts."""
        strategy = self._trainer.strategy
        if not hasattr(strategy, "training_step"):
            say_once("lightning step", "fwd and bwd are not timed: this version's strategies have no training_step")
            return
        is_automatic = bool(module.automatic_optimization)
        # In manual optimization the backward is inside of the training step: what the module calls itself is timed.
        model = strategy.model if is_automatic else module
        attached = straggler.attach(model, kernels_every=sampling_interval(None, self._kernels_every))
        self.on_detach(attached.detach)
        if is_automatic:
            self.replace(strategy, "training_step", attached.around(strategy.training_step))

    def leave_out(self, is_bad: Callable[[], bool], module: Any) -> None:
        """Let steps that `is_bad` tells make nothing of their batches: no forward, no gradients, no change.

        They count as steps for Lightning, its schedulers and its loops.
        """
        strategy = self._trainer.strategy
        if not module.automatic_optimization or getattr(strategy.precision_plugin, "scaler", None) is not None:
            say_once(
                "left out",
                "batches whose numbers were bad are trained on again: neither manual optimization nor a gradient "
                "scaler (16-mixed) can do a step without a loss",
            )
            return
        plain = strategy.training_step

        def training_step(*args: Any, **options: Any) -> Any:
            import torch

            if not is_bad():
                return plain(*args, **options)
            return torch.zeros((), device=strategy.root_device, requires_grad=True)

        self.replace(strategy, "training_step", training_step)

    def detach(self) -> None:
        """Leave the trainer as it was, and nothing open, as an exception may have. May be repeated."""
        for section in (*self.profiler.sections.values(), self.eval):
            section.drop()
        super().detach()


# -- checkpoints

FILE = "lightning.ckpt"


def part_name(strategy: Any) -> str | None:
    """Return what the strategy writes in a checkpoint, a file or a directory; None = nothing that we can keep."""
    if type(strategy).__name__.startswith("DeepSpeed"):
        return None  # nested directories, by rank
    if getattr(strategy, "_state_dict_type", None) == "sharded" or getattr(
        strategy, "_save_distributed_checkpoint", False
    ):
        return SHARDED
    return FILE


def find_part(directory: Path) -> Path:
    """Return what Lightning loads of a checkpoint: `fit(ckpt_path=...)`."""
    return directory / FILE if (directory / FILE).exists() else directory / SHARDED


def save(trainer: Any, path: Path) -> None:
    """Save; raises what the writing raised, but after the barrier in which the other ranks wait. Collective."""
    strategy = trainer.strategy
    if part_name(strategy) != FILE:
        trainer.save_checkpoint(path, weights_only=False)
        return
    with _innermost_io(strategy) as writes, errors_kept(writes, "save_checkpoint"):
        trainer.save_checkpoint(path, weights_only=False)


@contextmanager
def _innermost_io(strategy: Any) -> Iterator[Any]:
    """Let what really writes checkpoints be the strategy's; a wrapper (asynchronous, mirroring) may do so later."""
    plain = innermost = strategy.checkpoint_io
    while hasattr(innermost, "checkpoint_io"):
        innermost = innermost.checkpoint_io
    strategy.checkpoint_io = innermost
    try:
        yield innermost
    finally:
        strategy.checkpoint_io = plain


class CheckpointStaging:
    """Takes what a trainer would save between its `dump_checkpoint` and its `CheckpointIO`; a `Stager`.

    For checkpoints that are one file. Keeps its copies' memory from one save to the next.
    """

    def __init__(self, trainer: Any) -> None:
        from resilience_sdk.checkpoint.capture import Staging

        self._trainer = trainer
        self._staging = Staging()

    def __call__(self, directory: Path) -> Callable[[], object]:
        """Take it; on all ranks, where Lightning calls collectives. Raises what Lightning or a copy raises."""
        given: list[tuple[Any, ...]] = []
        patches = Patches()
        with _innermost_io(self._trainer.strategy) as writes:
            plain = writes.save_checkpoint
            patches.replace(writes, "save_checkpoint", lambda *arguments, **_: given.append(arguments))
            try:
                self._trainer.save_checkpoint(directory / FILE, weights_only=False)
            finally:
                patches.detach()
        if not given:
            return lambda: None  # another rank writes
        [(checkpoint, path, *_)] = given
        try:
            copied = self._staging.copy_all(checkpoint)
        except Exception as error:  # noqa: BLE001 - what callbacks and hyperparameters hold may be anything
            say_not_copied(error)
            plain(checkpoint, path)
            return lambda: None
        return lambda: plain(copied, path)


def save_last(trainer: Any, step: int) -> None:
    """Save where Lightning's own `ModelCheckpoint` would, as its last: `fit(ckpt_path="last")` finds it. Collective."""
    callback = trainer.checkpoint_callback
    directory = Path(getattr(callback, "dirpath", None) or trainer.default_root_dir)
    name = getattr(callback, "CHECKPOINT_NAME_LAST", "last") + getattr(callback, "FILE_EXTENSION", ".ckpt")
    try:
        save(trainer, directory / name)
    except Exception as error:  # noqa: BLE001 - a save that fails must not hinder the stop
        say(f"{directory / name} could not be saved: {describe(error)}")
        return
    if trainer.is_global_zero:
        say(f'saved after step {step}: {directory / name}; fit(ckpt_path="last") resumes it')


class FitCheckpoints:
    """The checkpoints of one fit in the run directory; of the thread that trains, on all ranks.

    A part of each is every rank's own: the position of its data loader, for the ranks whose own Lightning does not
    save, which are all but rank 0.
    """

    def __init__(self, trainer: Any, session: Session, name: str) -> None:
        self._trainer = trainer
        self._name = name
        self._resumed: Path | None = None
        self._own_loaders: list[Any] = []
        self.checkpointer = checkpointer(session, self._write, CheckpointStaging(trainer) if name == FILE else None)
        self.checkpointer.add_data("lightning.loader", self)

    def _write(self, directory: Path) -> None:
        save(self._trainer, directory / self._name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loaders that have one."""
        loop = self._trainer.fit_loop.on_save_checkpoint()
        return {"loaders": loop["combined_loader"]} if loop.get("combined_loader") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until Lightning asks for it."""
        self._own_loaders = list(state.get("loaders") or ())

    def choose(self) -> None:
        """Agree on the newest valid checkpoint. Collective; raises CheckpointError."""
        if self.checkpointer.resume():
            good = self.checkpointer.last_good
            self._resumed = None if good is None else find_part(good.path)

    def load(self, *, asked: bool) -> None:
        """Let Lightning load it. `asked`: the user has our path, and gives it to `fit` as `ckpt_path`.

        Before Lightning restores the model: at the setup, or when the strategy is set up, as that one needs it. A
        `ckpt_path` that the user gives is loaded after this, and so has precedence.
        """
        if self._resumed is None or asked:
            return
        connector = getattr(self._trainer, "_checkpoint_connector", None)
        start = getattr(connector, "resume_start", None)
        if start is None:
            raise CheckpointError(
                f"{self._resumed} is to be resumed, and this version of Lightning does not let a callback do it: "
                "call trainer.fit(model, ckpt_path=callback.ckpt_path)"
            )
        with straggler.section("resume", kind="io"):
            start(str(self._resumed))

    def loaded(self, checkpoint: dict[str, Any]) -> None:
        """Put this rank's own position of the data in the place of rank 0's in what Lightning has loaded."""
        if self._resumed is None:
            return
        other = getattr(self._trainer, "ckpt_path", None)
        if other and Path(other).absolute() != self._resumed.absolute():
            if self._trainer.is_global_zero:
                say(f"fit(ckpt_path={str(other)!r}) is resumed, not {self._resumed}")
            self._resumed = None
            return
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._own_loaders and loop.get("combined_loader"):
            loop["combined_loader"] = self._own_loaders

    def restore_random_numbers(self) -> None:
        """Set the generators as they were at the save: before the first batch, after all that Lightning sets up."""
        if self._resumed is not None:
            self.checkpointer.restore_rng()


_TRAINED: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
"""Sessions in which a fit has been, and how many steps the furthest had completed."""


class Fit:
    """One fit of one trainer, of the thread that trains. What it does is its `role`, see `roles`."""

    def __init__(
        self,
        trainer: Any,
        role: frozenset[str],
        session: Session,
        *,
        resumes: bool,
        log: logging.Logger,
        signals: tuple[int, ...] = (),
    ) -> None:
        """Hang on what is there at the setup. Collective, if it saves.

        `resumes`: load the newest checkpoint. `signals`: those to leave, beside those of the settings.
        """
        self.trainer = trainer
        self._role = role
        self.session = session
        self._log = log
        self._signals = signals
        self._step = -1
        self._is_worked = False
        self._has_ended = False
        self._is_trial = bool(trainer.fast_dev_run)  # saves nothing, completes nothing
        self._beat = StepBeat()
        self._losses = StepLoss() if NUMERICS in role and not self._is_trial and numerics.is_on() else None
        self._evaluation = EvaluationBeat()
        self._heard_before = listening.hears()
        if PREEMPTION in role:
            preemption.time_left()  # a signal in the start-up is answered behind the first step
            listening.take_over({})  # an earlier fit has given them back
        recorder = lookup.recorder()
        if recorder is not None and BEAT in role:
            recorder.begin()  # an earlier fit has ended all deadlines
        if FINISH in role and not self._is_trial:
            reopen(session)
        self.sections = FitSections(trainer) if SECTIONS in role else None
        self.checkpoints: FitCheckpoints | None = None
        self._checkpointer: Checkpointer | None = None
        if CHECKPOINT in role and not self._is_trial:
            try:
                self._prepare_saves(resumes=resumes and session.may_resume and session not in _TRAINED)
            except BaseException:  # the callback has no fit yet that it could end
                self._release()
                raise

    # -- checkpoints

    def _prepare_saves(self, *, resumes: bool) -> None:
        name = part_name(self.trainer.strategy)
        if name is None:
            strategy = type(self.trainer.strategy).__name__
            say_once("strategy", f"no checkpoints are saved or resumed: {strategy} has a way of its own to write them")
            return
        self.checkpoints = FitCheckpoints(self.trainer, self.session, name)
        self._checkpointer = self.checkpoints.checkpointer
        if resumes:
            self.checkpoints.choose()

    def _expected_save_s(self) -> float:
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_save_s

    # -- the training

    def train_starts(self, module: Any) -> None:
        """Take the signals over, and time the model, which is wrapped by now."""
        self._step = int(self.trainer.global_step)
        earlier = _TRAINED.get(self.session)
        if self._checkpointer is not None and earlier is not None and self._step < earlier:
            self._checkpointer = None
            say_once(
                "another fit",
                f"this fit saves no checkpoints: those in {self.session.run_dir.path} are of an earlier one in this "
                f"process, of {earlier} steps; give each training a process and a run directory of its own",
            )
        if PREEMPTION in self._role:
            # Behind Lightning, which puts back what was there before it at the teardown. In a thread it has none.
            connector = getattr(self.trainer, "_signal_connector", None)
            listening.take_over(dict(getattr(connector, "_original_handlers", None) or {}), self._signals)
            listening.begin(self._expected_save_s)
        if self.sections is not None:
            self.sections.attach(module)
            if self.checkpoints is not None and self._checkpointer is not None:
                self.sections.profiler.before_fetch = self.checkpoints.restore_random_numbers
                if self._checkpointer.skipped_steps:
                    self.sections.leave_out(self._is_left_out, module)

    def _is_left_out(self) -> bool:
        """Tell whether the numbers of the step that is under way were bad, and the run was rolled back over it."""
        if self._checkpointer is None or self._step not in self._checkpointer.skipped_steps:
            return False
        say_left_out(self._step, self.session.identity.rank)
        return True

    def batch_starts(self) -> None:
        """Begin the heartbeat of an optimizer step, with its first batch."""
        if BEAT in self._role:
            self._beat.begin(self._step)

    def batch_ends(self, outputs: Any = None) -> None:
        """End it with the batch that made the step; then stop if all ranks agreed to, or save if it is time.

        `outputs`: what the training step has given, such as its loss. May raise NumericsError.
        """
        if self._losses is not None:
            self._losses.add(_loss_of(outputs))
        step = int(self.trainer.global_step)
        if step == self._step:
            return  # gradients are accumulated
        if self._losses is not None:
            numerics.judge_steps()
            if self._checkpointer is not None and self._is_left_out():
                self._losses.drop()
            self._losses.end(self._step)
        self._step, self._is_worked = step, True
        self._beat.end()
        if PREEMPTION in self._role and preemption.check(StepsDone(step)):
            self._stop(step)
        if self._checkpointer is not None:
            self._checkpointer.maybe_save(step)

    def _stop(self, step: int) -> None:
        """Save and leave; all ranks are here, behind the same step."""
        if self.trainer.is_global_zero:
            for line in lines_of_stop(listening.handlers()):
                self._log.warning(line)
        if BEAT not in self._role:
            heartbeat.done()  # progress is what optimizers do, and these deadlines would go on in the save
        if self._checkpointer is not None:
            save_at_stop(self._checkpointer, step, self.session)
        elif not self._is_trial and fits(None, step, self.session):
            save_last(self.trainer, step)
        heartbeat.done()
        # Where Lightning has started the ranks itself, a thread of rank 0 looks for one that has ended with another
        # code than 0, and kills all that are left. It looks into this list.
        processes = getattr(getattr(self.trainer.strategy, "launcher", None), "procs", None)
        if isinstance(processes, list):
            processes.clear()
        raise Preempted

    def eval_starts(self) -> None:
        """Begin section `eval`; a step that is not complete does not count its time."""
        self._beat.interrupt()
        if self.sections is not None:
            self.sections.eval.begin()

    def eval_batch_starts(self) -> None:
        """Begin the heartbeat of a batch of the evaluation."""
        if BEAT in self._role:
            self._evaluation.begin()

    def eval_batch_ends(self) -> None:
        """End it."""
        self._evaluation.end()

    def eval_ends(self) -> None:
        """End section `eval`."""
        if self.sections is not None:
            self.sections.eval.end()

    def epoch_ends(self) -> None:
        """Leave a step that the last batches did not complete, as with manual optimization: a save may come now."""
        self._beat.interrupt()

    def train_ends(self) -> None:
        """Save once more: what has run its course can be resumed, or looked at, too. Collective."""
        self._has_ended = True
        self._beat.drop()
        if self._losses is not None:
            numerics.settle()  # the last step's loss is not judged yet, and the save is to be good
        if self._checkpointer is not None and self._is_worked:
            self._checkpointer.save(int(self.trainer.global_step), last=True)

    # -- the end

    def ends(self) -> None:
        """Set the finished flag, and leave the trainer as it was. Collective."""
        self._release()
        is_over = FINISH in self._role and not self._is_trial and is_complete(self.trainer, has_ended=self._has_ended)
        if is_over:
            finish(self.session, int(self.trainer.global_step))

    def fails(self, error: BaseException) -> None:
        """Leave the trainer as it was, after an exception. No collective: the other ranks may be elsewhere."""
        self._release(is_leaving=isinstance(error, Preempted))
        good = None if self._checkpointer is None else self._checkpointer.last_good
        how = "stopped" if isinstance(error, Preempted) else f"the training ended by {type(error).__name__}"
        say_how_to_resume(self.session, None if good is None else good.step, how)

    def _release(self, *, is_leaving: bool = False) -> None:
        self._beat.drop()
        self._evaluation.drop()
        if self.sections is not None:
            self.sections.detach()
        if PREEMPTION in self._role and not is_leaving:  # who leaves may be signalled again
            listening.give_back(all_of_them=not self._heard_before)
        if BEAT in self._role:
            heartbeat.done()
        if self._step >= 0:
            _TRAINED[self.session] = max(self._step, _TRAINED.get(self.session, 0))


def _loss_of(outputs: Any) -> Any:
    """Return the loss in what a training step has given, which is a tensor or a mapping; None where it has none."""
    # Nearly always a dict, which need not be asked as slowly as what only might be a mapping.
    return outputs.get("loss") if isinstance(outputs, (dict, Mapping)) else outputs


def lines_of_stop(handlers: Handlers | None) -> list[str]:
    """Return what is logged of a stop, in NeMo's words; of the signal only where this rank has heard one."""
    heard = None if handlers is None else handlers.heard
    lines = [] if heard is None else [f"Received signal {heard}, initiating graceful stop"]
    return [*lines, "Preemption detected, saving checkpoint and exiting"]
