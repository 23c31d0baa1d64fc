"""Plain PyTorch: one line beside a loop of one's own.

from resilience_sdk.adapters import pytorch

    handle = pytorch.attach(model, optimizer, loader)  # last: after DDP, fully_shard or torch.compile

`resilience_sdk.start_run` and `Run.steps` are the full form, which saves and resumes too.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import monotonic
from typing import Any

from resilience_sdk import preemption, straggler
from resilience_sdk.adapters._base import AttachedLoop, EvaluationBeat, StepBeat, StepLoss, say_left_out
from resilience_sdk.adapters._batch_work import BatchWork
from resilience_sdk.adapters._proof import proof_of
from resilience_sdk.adapters._timed_loader import TimedLoader
from resilience_sdk.checkpoint.checkpointer import saved_objects
from resilience_sdk.checkpoint.loaders import offer, withdraw
from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.rank.lifecycle import current
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.rank.run import is_stepping, resilient
from resilience_sdk.rank.schedule_length import length_of
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.model_hooks import Guard

__all__ = ["Attached", "attach", "resilient"]

_NEVER = math.inf
_CURES = {
    "samples": "let samplers draw from torch's generators or from set_epoch(epoch), and the loader go on where it was: "
    "torchdata's StatefulDataLoader, given to attach() or the state, or run.steps()",
    "learning rate": "give the scheduler to the state of the Checkpointer, and step it at one place of the loop",
    "generators": "let nothing seed or draw from a generator between the resume and the first batch",
    "loss": "look for what the step uses and the state of the Checkpointer does not hold",
    "weights": "look for what the step uses and the state of the Checkpointer does not hold, such as a generator in a "
    "variable of the script, a buffer, an average or a module of its own",
}


def attach(model: Any, optimizer: Any, loader: Any = None, *, first_step: int | None = None) -> Attached:
    """Watch a training loop without a line in it; the handle's `detach()` ends that.

    Each step of `optimizer` is a heartbeat, which begins with the first forward that has gradients, so that under
    gradient accumulation all micro-batches are in it; not what comes behind the last batch of `loader`, nor a forward
    in another mode (`model.eval()`) than that of the last step. `fwd`, `bwd`, `comm_wait` and `optim` are sections (see
    `straggler.attach`), and `data` is the wait for the batches of `loader`. Each optimizer step ends with a
    `preemption.check()`: once all ranks have agreed to stop, `Preempted` is raised where the next step begins (the
    next batch of `loader`; where none of it is seen, the next forward or the next optimizer step, whichever comes
    first), on every rank behind the same step. Catch it around the loop, save, and raise it again.

    Call it on every rank, last, on the object that the loop calls: after DDP, `fully_shard` or `torch.compile`. Inside
    `Run.steps` and `@resilient` only the sections are added, since those beat and check themselves. No collective, no
    synchronisation with a device. A hook that fails says so once and switches all off.

    Args:
        model: The `nn.Module` that the loop calls.
        optimizer: The `torch.optim.Optimizer` whose steps are the progress.
        loader: What each epoch iterates anew, such as a `DataLoader`. It stays the object that it is.
        first_step: How many steps are complete already, as a resume knows it: steps then have global numbers in
            reports. None where nothing is resumed; they are counted per attempt.

    Raises:
        ConfigError: An argument is wrong, or the process has a loop attached already.

    Example:
        handle = pytorch.attach(model, optimizer, loader)
        try:
            for batch in loader:
                train_step(batch)
        except resilience_sdk.Preempted:
            save()
            raise
    """
    _check(model, optimizer)
    handle = Attached(model, optimizer, loader, first_step)
    if loader is not None and first_step is not None:
        handle.prove(loader, optimizer)
    elif first_step is not None:
        note(
            "no loader",
            "the place in the data",
            "attach() was given no loader, so which samples come next is the script's to find, and what it had read "
            "ahead of the save is lost (where a step draws its samples itself, from the generators of Python, NumPy and"
            " torch alone, the resume is exact; an environment that goes on belongs into state)",
            "give attach() a loader with a state, such as torchdata's StatefulDataLoader",
        )
    return handle


class Attached(AttachedLoop):
    """The hooks on one loop, and its steps so far; a context manager that detaches. The thread that trains.

    For adapters built on this one: they may have a part in each pass over the loader (`walk`), and between two steps.
    """

    caller, what_fails = "attach", "heartbeats and preemption"
    proof: LoopProof | None = None
    """What proves the resumes of this loop."""
    _proven: weakref.ref[Any] | None = None
    """The loader whose batches it is given."""
    cure_of_second = 'or for a second model of the same loop use straggler.attach(model, optimizer, prefix="critic.")'

    def __init__(self, model: Any, optimizer: Any, loader: Any, first_step: int | None) -> None:
        """Put the hooks on; use `attach`."""
        super().__init__(first_step)
        self._is_global = first_step is not None
        self._is_between = False  # what is due between two steps was not done yet
        self._is_leaving = False
        self._is_apart = False
        self._is_in_step = False
        self._alone: set[bool] = set()  # the hooks that we have put on, since those of the sections are gone
        self._due_at = 0.0
        # Of the last forward with gradients, and of that of the last complete step: whether in training mode.
        self._mode = self._mode_of_steps = True
        self._beat = StepBeat()
        self._losses = StepLoss()
        self._evaluation = EvaluationBeat()
        self._thread = 0  # that of the last forward with gradients
        self._loader: TimedLoader | None = None
        self._work = BatchWork()
        self._is_unused = False  # nothing was made of the newest batch yet
        try:
            self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
            self._put_on(model, optimizer, loader)
        except BaseException:
            self.detach()
            raise

    def _put_on(self, model: Any, optimizer: Any, loader: Any) -> None:
        if environ.is_disabled(environ.environment()):
            self.guard.is_on = False
            lookup.recorder()  # says so
            self.on_detach(optimizer.register_step_post_hook(Guard(_ignore)(self._step_ends)).remove)
            return
        # A signal in the start-up is answered behind the first step. And before the loader forks workers, which would
        # take the signals as theirs.
        preemption.time_left()
        if loader is not None:
            self._watch_loader(loader)
        self._sections = straggler.attach(
            model,
            optimizer,
            on_forward=self._forward_begins,
            on_inference=self._inference_begins,
            on_inference_end=self._evaluation.end,
            on_step=self._step_begins,
            on_step_end=self._step_ends,
            on_failure=self._sections_failed,
        )
        self.on_detach(self._sections.detach)
        if numerics.is_on():
            self._watch_losses()

    def _watch_losses(self) -> None:
        """Hear of each loss where its backward begins: a loop of one's own calls nothing else with it."""
        import torch

        self.replace(torch.autograd, "backward", self._heard(torch.autograd.backward))
        for kind in scalers(torch.amp.GradScaler):
            self.replace(kind, "scale", unscaled_kept(kind.scale))

    def _heard(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        guard, losses, tensor = self.guard, self._losses, torch.Tensor

        @functools.wraps(plain)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> Any:
            if grad_tensors is not None or not guard.is_on or get_ident() != self._thread:
                return plain(tensors, grad_tensors, *args, **options)
            watch = losses.watch
            if watch is not None and watch.is_waiting:
                numerics.judge_steps()  # here, since an error would not pass through a hook
            result = plain(tensors, None, *args, **options)
            if guard.is_on:
                try:
                    loader, work = self._loader, self._work
                    if loader is not None and loader.fetched == work.fetched and work.fetched:
                        work.has_loss_behind = True
                    # Of one element, which torch insists on where no gradients are given.
                    for loss in (tensors,) if isinstance(tensors, tensor) else tensors:
                        if isinstance(loss, tensor):  # it may be an edge of the graph
                            losses.add(getattr(loss, _UNSCALED, loss))
                except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                    guard.fail(error)
            return result

        return backward

    def _watch_loader(self, loader: Any) -> None:
        self._loader = TimedLoader(loader, self)
        self.on_detach(self._loader.restore)
        self._offer(loader)

    def _offer(self, loader: Any) -> None:
        """Let the loader travel with what the script saves."""
        offer(loader)
        self.on_detach(functools.partial(withdraw, loader))

    @property
    def is_attached(self) -> bool:
        """Whether it was not detached yet, and the model is still there."""
        return self._is_attached and self._model() is not None

    def drop(self) -> None:
        """Close the step that is open, which does not count."""
        self._beat.drop()
        self._losses.drop()
        self._evaluation.drop()

    # -- for adapters built on this one

    def pass_begins(self) -> None:
        """Set what a new iterator of the loader draws its order from."""

    def make_pass(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return a new iterator of the loader."""
        loader = None if self._proven is None else self._proven()
        if loader is None or not self.guard.is_on:
            return make()
        return self._prints.make(loader, make)

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return what is iterated in the place of a new iterator of the loader: it may count, and leave out."""
        return batches

    def without(
        self, bad_steps: Collection[int], batches: Iterator[Any], per_step: int, *, is_speaker: bool
    ) -> Iterator[Any]:
        """Leave out the batches of steps whose numbers were bad; each counts as a step, so that all have their own.

        `per_step`: how many batches a step has. Only the speaker says so.
        """
        step, read, left = self.step, 0, 0
        for batch in batches:
            if self.step != step:
                step, read = self.step, 0
            if not left and not read and step in bad_steps:
                say_left_out(step, 0 if is_speaker else 1)
                left = per_step
            if left:
                left -= 1
                if not left:
                    self.leave_out_step()
                continue
            read += 1
            yield batch
        if left:  # a pass ends with fewer
            self.leave_out_step()

    def prove(self, loader: Any, optimizer: Any) -> None:
        """Leave a witness of each step from now on, and compare those that are repeated: their numbers are global."""
        self._prints = PassPrint()
        self.proof = proof_of(
            current(), self._prints, [optimizer], tuple, _CURES, length=lambda: length_of(saved_objects())
        )
        if self.proof is None or self._loader is None:
            return
        self._proven = weakref.ref(loader)
        self._loader.took = self._took
        self.on_detach(self.proof.close)

    def _took(self, batch: Any) -> None:
        if self.guard.is_on:
            self._prints.note(batch)
            self.batch_read(None, 0, batch)

    def batch_read(self, epoch: int | None, number: int, batch: Any) -> None:
        """Take a batch that the loop is about to get: that of this number in its pass."""
        proof = self.proof
        if proof is not None:
            if self._is_unused:
                proof.undo()  # as one that a loop skips on its way back
            self._is_unused = True
            proof.batch(epoch, number, batch)

    def leave_out_step(self) -> None:
        """Count a step that was not made."""
        if self.proof is not None:
            self.proof.drop()
        self.go_to(self.step + 1)

    def pass_ends(self) -> None:
        """Leave a step that the last batches did not complete."""
        self._beat.interrupt()

    def between_steps(self, is_leaving: bool) -> float:
        """Do what is due where a step has ended and the next one begins; return behind how many steps it is again."""
        return _NEVER

    @property
    def saves_between(self) -> bool:
        """Whether there may be something to do between two steps."""
        return False

    def expected_save_s(self) -> float:
        """Return how many seconds the last save before a stop will take; 0 where that is not known."""
        return 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no step for one meanwhile: loading the state of an optimizer may make some."""
        before = self.step, self._is_between, self._is_leaving, self._due_at
        self._is_between, self._is_leaving, self._due_at = False, False, _NEVER
        was_on, self.guard.is_on = self.guard.is_on, False
        self._beat.drop()
        try:
            yield
        finally:
            self.step, self._is_between, self._is_leaving, self._due_at = before
            self.guard.is_on = was_on and self._is_attached

    def go_to(self, step: int) -> None:
        """Go on behind another number of steps, as of a state that was loaded."""
        self.step = step
        if not self._is_apart:
            self._due_at = 0.0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Only count steps meanwhile, of which ranks may take different numbers, until they `meet()`.

        What was due before is done first; all ranks are here.
        """
        self._leave_if_asked()
        self._is_apart, self._due_at = True, _NEVER
        try:
            yield
        finally:
            self._is_apart, self._due_at = False, 0.0
            # Of micro-batches that make no step any more: its deadline would go on while this rank waits for others.
            self._beat.drop()
            self._losses.drop()

    def meet(self, most: int) -> None:
        """Go on with as many steps as the rank that took `most`, and do what is due between two.

        All ranks are here. Raises `Preempted`.
        """
        self.step, self._is_between = most, True
        self.guard.run(self._check)
        self._leave_if_asked()

    # -- what the hooks tell

    # In every step: a call that can be spared is.

    def _forward_begins(self) -> None:
        if (self._is_between or self._is_leaving) and not self._is_within_batch():
            self._leave_if_asked()
        if self.guard.is_on:
            model = self._model()
            self._is_unused = False
            self._mode = mode = model is None or bool(model.training)
            self._thread = get_ident()
            if mode is self._mode_of_steps:
                self._beat.begin(self.step if self._is_global else None)
            else:
                self._beat.interrupt()  # an evaluation that wants gradients, or the first step of a frozen model

    def _inference_begins(self) -> None:
        model = self._model()
        if (model is None or bool(model.training)) is not self._mode_of_steps:
            self._beat.interrupt()  # an evaluation, behind micro-batches that made no step
            self._evaluation.begin()

    def _step_begins(self) -> None:
        self._is_in_step = True
        if (self._is_between or self._is_leaving) and not self._is_within_batch():
            self._leave_if_asked()
        beat = self._beat.beat
        if beat is None or not beat.t0:  # of a model whose forward was not seen
            self.guard.run(self._begin)

    def _begin(self) -> None:
        self._beat.begin(self.step if self._is_global else None)

    def _step_ends(self, *_: Any) -> None:
        self._is_in_step = False
        # Whatever becomes of the rest: loops end by the number, and what is done between two steps may be collective,
        # so that the other ranks would wait there for one whose hooks have failed.
        self.step += 1
        self._is_between = self.step >= self._due_at
        self._mode_of_steps = self._mode
        if self.guard.is_on:  # `Guard.run`, written out
            try:
                if self.proof is not None:
                    self.proof.step(self.step - 1)
                self._losses.end(self.step - 1 if self._is_global else None)
                self._beat.end()
                if not (self._is_apart or is_stepping()) and preemption.check(StepsDone(self.step)):
                    # Not here: a scheduler and a scaler still have their part of this step to do.
                    self._is_leaving = True
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self.guard.fail(error)
        loader, work = self._loader, self._work
        if loader is not None:
            now = monotonic()
            work.took_s, work.at_s = now - work.at_s, now
            if loader.fetched == work.fetched:
                work.steps += 1
            else:
                work.most = max(work.most, work.steps)
                work.fetched, work.steps = loader.fetched, 1
                if work.has_loss_behind and self.proof is not None:
                    self.proof.losses_begin_behind()
            work.has_loss_behind = False
            if self._is_between or self._is_leaving:
                loader.due = self._batch_is_asked_for

    def _check(self) -> None:
        if not is_stepping() and preemption.check(StepsDone(self.step)):
            self._is_leaving = True

    def _sections_failed(self) -> None:
        self._hook_alone(behind=self._is_in_step)

    def _hook_alone(self, *, behind: bool) -> None:
        """Put a hook of our own on the optimizer, before or behind its steps; each puts on the other one.

        Never both at once: torch may be going through those before a step, or those behind it.
        """
        optimizer = self._optimizer()
        if optimizer is None or not self._is_attached or behind in self._alone:
            return
        self._alone.add(behind)
        if behind:
            hook = optimizer.register_step_post_hook(Guard(_ignore)(self._ends_alone))
        else:
            hook = optimizer.register_step_pre_hook(Guard(self._failed)(self._begins_alone))
        self.on_detach(hook.remove)

    def _begins_alone(self, *_: Any) -> None:
        self._hook_alone(behind=True)
        self._step_begins()

    def _ends_alone(self, *_: Any) -> None:
        self._step_ends()
        self._hook_alone(behind=False)

    def _is_within_batch(self) -> bool:
        """Tell whether what is due waits for the next batch that is asked for. Collective."""
        if not (self._is_leaving or self.saves_between):
            return False
        left_s = preemption.time_left() if self._is_leaving else None
        return self._work.waits(self.step, save_s=self.expected_save_s(), left_s=left_s)

    def _batch_is_asked_for(self) -> None:
        if self._thread in (0, get_ident()):  # not by one that reads ahead
            self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        self._work.is_through()
        if self._loader is not None:
            self._loader.due = None
        if self._is_between or self._is_leaving:
            self._is_between = False
            self._due_at = self.between_steps(self._is_leaving)
        if self._is_leaving:
            self._is_leaving = False
            heartbeat.done()  # saving may take any time
            raise Preempted


def _ignore(_error: Exception) -> None:
    """Counting cannot fail."""


_UNSCALED = "resilience_loss"


def scalers(kind: Any) -> Iterator[Any]:
    """Yield the class of gradient scalers and those below it that scale by themselves, as that of FSDP1 does."""
    if "scale" in vars(kind):
        yield kind
    for below in kind.__subclasses__():
        yield from scalers(below)


def unscaled_kept(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `GradScaler.scale` such that a scaled loss brings along what it was: the scale changes by itself."""

    @functools.wraps(plain)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = plain(scaler, outputs)
        if scaled is not outputs and hasattr(outputs, "detach"):
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    return scale


def _check(model: Any, optimizer: Any) -> None:
    try:
        optimizer.register_step_post_hook(_ignore).remove()
    except AttributeError:  # also of a subclass that has never called __init__ of its base
        raise ConfigError(
            f"attach(model, {optimizer!r}): expected the torch.optim.Optimizer whose steps are the progress; "
            "of a wrapper pass the one inside"
        ) from None
    if not hasattr(model, "parameters"):
        return  # straggler.attach says what is expected
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        say_once(
            "foreign parameters",
            "attach: the optimizer has none of the model's parameters; if it was made before fully_shard(model) or "
            "model.to(device), it trains nothing: make it afterwards",
        )
