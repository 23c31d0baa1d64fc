"""One fit: what a callback of ours does from the setup of a trainer to its teardown.

Lightning installs a handler of SIGTERM when a training starts, which calls a collective inside the handler. The rank
that got the signal waits there for the others, and they wait for it in their backward: with more than one rank most
runs never end. So ours replaces it, before the first step; what was there before Lightning is chained as ever.

Lightning asks its profiler around everything it does. A delegate in the profiler's place hears where it waits for
data and where it saves; the user's own profiler hears all that it did before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from resilience_sdk import preemption, straggler
from resilience_sdk.adapters._base import EvaluationBeat, HookedSection, Patches, StepBeat, StepLoss, say_left_out
from resilience_sdk.adapters.lightning import epoch_starts
from resilience_sdk.adapters.lightning.loops import Loops, missing_seams, say_missing
from resilience_sdk.adapters.lightning.proof import FitProof
from resilience_sdk.adapters.lightning.saves import MARK, FitCheckpoints, part_name, save_last
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.ranks import agreement, find_ranks, group_is_ready
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import finish, reopen
from resilience_sdk.rank.checkpoints import fits, save_at_stop, say_how_to_resume
from resilience_sdk.rank.pass_print import PassPrint
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
        attached.if_never_called = (
            "fwd and bwd are not timed: in manual optimization they are those of calls of the module itself, self(x), "
            "and training_step calls its parts (nothing else depends on it)"
        )
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
        self.was_finished = FINISH not in role or self._is_trial or session.run_dir.is_finished()
        """Whether an earlier fit has come to its end; known on all ranks alike where this one saves."""
        if FINISH in role and not self._is_trial:
            reopen(session)
        self.sections = FitSections(trainer) if SECTIONS in role else None
        self._lost_files: Patches | None = None
        self.loops = self._hear_loops()
        self.is_saving = False
        self._is_due = self._is_leaving = False
        """Whether a step was made since it was last looked whether to save, and whether all ranks leave behind it."""
        self.checkpoints: FitCheckpoints | None = None
        self._checkpointer: Checkpointer | None = None
        self._proof: FitProof | None = None
        if CHECKPOINT in role and not self._is_trial:
            try:
                self._prepare_saves(resumes=resumes and session.may_resume and session not in _TRAINED)
            except BaseException:  # the callback has no fit yet that it could end
                self._release()
                raise

    def _hear_loops(self) -> Loops | None:
        """Return what tells us of the ends of batches and epochs, where we save or leave there."""
        if self._is_trial or not self._role & {CHECKPOINT, PREEMPTION}:
            return None
        missing = missing_seams(self.trainer)
        if missing:
            say_missing(missing)
            return None
        return Loops(self.trainer, self, has_data=CHECKPOINT in self._role)

    # -- checkpoints

    def _prepare_saves(self, *, resumes: bool) -> None:
        name = part_name(self.trainer.strategy)
        if name is None:
            strategy = type(self.trainer.strategy).__name__
            say_once("strategy", f"no checkpoints are saved or resumed: {strategy} has a way of its own to write them")
            return
        self.checkpoints = FitCheckpoints(self.trainer, self.session, name, self.loops)
        self._checkpointer = self.checkpoints.checkpointer
        if group_is_ready():  # rank 0 may have taken the flag away before another one has looked
            self.was_finished = bool(find_ranks().broadcast(self.was_finished))
        data = None if self.loops is None else self.loops.data
        prints = PassPrint() if data is None else data.prints
        self._proof = FitProof(self.trainer, self.session, self.checkpoints, prints)
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
        self._say_limits()
        if self._proof is not None:
            self._proof.train_starts()
        if self.checkpoints is not None:
            self._lost_files = self.checkpoints.find_lost_files()
        if PREEMPTION in self._role:
            # Behind Lightning, which puts back what was there before it at the teardown. In a thread it has none.
            connector = getattr(self.trainer, "_signal_connector", None)
            listening.take_over(dict(getattr(connector, "_original_handlers", None) or {}), self._signals)
            listening.begin(self._expected_save_s)
        if self.sections is not None:
            self.sections.attach(module)
            if self.checkpoints is not None and self._checkpointer is not None:
                if self.loops is None:
                    self.sections.profiler.before_fetch = self.checkpoints.restore_random_numbers
                if self._checkpointer.skipped_steps:
                    self.sections.leave_out(self._is_left_out, module)

    def _say_limits(self) -> None:
        if self._checkpointer is not None:
            epoch_starts.say_limits(self.trainer)
        averages = [each for each in self.trainer.callbacks if "StochasticWeightAveraging" in _names_of(each)]
        if averages and self._checkpointer is not None:
            note(
                "swa",
                "the learning rates of StochasticWeightAveraging",
                "within its epochs it begins its schedule anew, and the state of yours is put into it",
                "average by torch.optim.swa_utils.AveragedModel in the module, with an SWALR in configure_optimizers",
            )

    def _is_left_out(self) -> bool:
        """Tell whether the numbers of the step that is under way were bad, and the run was rolled back over it."""
        if self._checkpointer is None or self._step not in self._checkpointer.skipped_steps:
            return False
        say_left_out(self._step, self.session.identity.rank)
        return True

    def batch_starts(self, batch: Any = None, number: int = 0) -> None:
        """Begin the heartbeat of an optimizer step, with its first batch: that of this number in its epoch."""
        if self._proof is not None:
            self._proof.batch(batch, number)
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
        if self._proof is not None:
            self._proof.step(self._step)
        if self._losses is not None:
            numerics.judge_steps()
            if self._checkpointer is not None and self._is_left_out():
                self._losses.drop()
            self._losses.end(self._step)
        self._step, self._is_worked = step, True
        self._beat.end()
        self._is_due = True
        self._is_leaving = PREEMPTION in self._role and preemption.check(StepsDone(step))
        if self.loops is None:
            self.settle()

    def is_leaving(self) -> bool:
        """Tell whether all ranks leave behind this batch."""
        return self._is_leaving

    def has_time_for(self, seconds: float | None) -> bool:
        """Tell whether what took so long may come before the last save; None: not known. Collective."""
        left_s = preemption.time_left()
        is_time = left_s is None or (seconds is not None and seconds + self._expected_save_s() <= left_s)
        if not group_is_ready():
            return is_time
        ranks = find_ranks()
        with agreement():
            return bool(ranks.broadcast(is_time))

    def settle(self) -> None:
        """Save if it is time, or leave; all ranks are between the same batches. Collective."""
        if not self._is_due:
            return
        self._is_due = False
        with self._saving():
            if self._is_leaving:
                self._stop(self._step)
            if self._checkpointer is not None:
                self._checkpointer.maybe_save(self._step)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False

    def mark(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint that we save say where in the loops it is."""
        if self.loops is not None and self.is_saving:
            checkpoint[MARK] = self.loops.mark()

    def loaded(self, checkpoint: dict[str, Any]) -> None:
        """Go on from where a checkpoint says that it was made, and put what is this rank's own into it."""
        if self.checkpoints is not None:
            self.checkpoints.loaded(checkpoint)
            if self.checkpoints.is_resumed:
                return
        if self.loops is not None and MARK in checkpoint:
            self.was_finished = True
            self.loops.resume(checkpoint, checkpoint[MARK])

    def restore_random_numbers(self) -> None:
        """Set the generators as they were at the save."""
        if self.checkpoints is not None:
            self.checkpoints.restore_random_numbers()

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
        if self.loops is not None:
            self.loops.is_evaluated = True
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
            with self._saving():
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
        for patches in (self.loops, self._lost_files, self._proof):
            if patches is not None:
                patches.detach()
        if PREEMPTION in self._role and not is_leaving:  # who leaves may be signalled again
            listening.give_back(all_of_them=not self._heard_before)
        if BEAT in self._role:
            heartbeat.done()
        if self._step >= 0:
            _TRAINED[self.session] = max(self._step, _TRAINED.get(self.session, 0))


def _names_of(callback: Any) -> list[str]:
    return [kind.__name__ for kind in type(callback).__mro__]


def _loss_of(outputs: Any) -> Any:
    """Return the loss in what a training step has given, which is a tensor or a mapping; None where it has none."""
    # Nearly always a dict, which need not be asked as slowly as what only might be a mapping.
    return outputs.get("loss") if isinstance(outputs, (dict, Mapping)) else outputs


def lines_of_stop(handlers: Handlers | None) -> list[str]:
    """Return what is logged of a stop, in NeMo's words; of the signal only where this rank has heard one."""
    heard = None if handlers is None else handlers.heard
    lines = [] if heard is None else [f"Received signal {heard}, initiating graceful stop"]
    return [*lines, "Preemption detected, saving checkpoint and exiting"]
