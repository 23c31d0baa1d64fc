"""A loop of one's own on `megatron.core`: `attach()` for its steps and sections.

Steps and sections are told by Megatron's timers and its optimizer. An exit code of Megatron stays what it is, since
schedulers know it; what is recorded beside it is what it means.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from resilience_sdk import preemption
from resilience_sdk.adapters._base import AttachedLoop, StepLoss
from resilience_sdk.adapters.megatron.proof import CURES, MegatronProof, known_saver, megatron_proof, watch_loader
from resilience_sdk.adapters.megatron.step import (
    IN_STEP,
    INTERVAL,
    LOAD,
    OPTIMIZER,
    SAVE,
    SECTION_OF,
    STEP,
    Heard,
    ObservingTimers,
    Step,
    itself,
    spans,
)
from resilience_sdk.checkpoint.checkpointer import saved_objects
from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.rank.lifecycle import current
from resilience_sdk.rank.run import is_stepping
from resilience_sdk.rank.schedule_length import length_of
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.attachment import kernel_sampler
from resilience_sdk.straggler.kernels import KernelSampler
from resilience_sdk.straggler.model_hooks import Guard
from resilience_sdk.straggler.workload import set_role


def module(name: str) -> Any:
    """Return `megatron.<name>` if the program has imported it, else None."""
    return sys.modules.get(f"megatron.{name}")


def say_first(key: str, text: str) -> None:
    """Say it once, on one rank of all: it is the same on each."""
    identity = environ.rank_identity(environ.environment())
    if identity is None or identity.rank == 0:
        say_once(key, text)


class RerunElsewhereError(Exception):
    """A result was unexpected, and the same again on the same GPU: another GPU has to compute it, to tell why."""


class ResultRejectedError(Exception):
    """A result did not pass its validation, and Megatron has come to the end of its reruns."""


# By the exit codes of Megatron's rerun state machine.
_MEANINGS: dict[int, tuple[type[Exception], str]] = {
    16: (
        RerunElsewhereError,
        "Megatron left with 16: an unexpected result came again on the same GPU, and the last step has to be computed "
        "on another one: resume the job on other nodes",
    ),
    17: (
        ResultRejectedError,
        "Megatron left with 17: a result failed its validation; its log says whether it came again (a transient error "
        "of a GPU, a persistent one, or the right result of the program)",
    ),
}


def meaning_of(code: object, suspect: str = "") -> Exception | None:
    """Return what an exit code of Megatron means, None where it is none of its own. Pure."""
    if not isinstance(code, int) or code not in _MEANINGS:
        return None
    kind, text = _MEANINGS[code]
    return kind(f"{text} (first seen on {suspect})" if suspect else text)


def record(error: BaseException | None) -> None:
    """Leave what Megatron's exit code means for the incident, if that is how this rank ends. Never raises.

    Megatron's own second run on the same GPU is a measurement: what it asks for is asked of the launcher.
    """
    if not isinstance(error, SystemExit):
        return
    meaning = meaning_of(error.code, _suspect())
    session = current()
    if meaning is not None and session is not None:
        session.record_exception(meaning)
        if isinstance(meaning, RerunElsewhereError):
            from resilience_sdk.postmortem.facts import EXCLUDE_NODE  # at the end of a rank, and seldom

            session.ask_launcher(EXCLUDE_NODE, str(meaning))


def _suspect() -> str:
    """Return which device the rerun state machine suspects; empty where it says nothing."""
    machine = getattr(module("core.rerun_state_machine"), "_GLOBAL_RERUN_STATE_MACHINE", None)
    node, device = getattr(machine, "suspicious_node", None), getattr(machine, "suspicious_device", None)
    return "" if node is None else f"node {node}, GPU {device}"


_MAX_STEPS_WITHOUT_OPTIMIZER = 3


def attach(config: Any, optimizer: Any = None, *, loader: Any = None, first_step: int | None = None) -> Attached:
    """Watch a training loop on `megatron.core`; the handle's `detach()` ends that.

    A delegate takes the place of `config.timers`, also where that is None, and hears what Megatron times: `fwd`, `bwd`,
    `data` (timer `batch-generator`), `comm_wait` (between stages, and for the gradients), `checkpoint` and `eval`.
    A step is a heartbeat: it begins with the first forward with gradients, and ends with `optimizer.step()`, which is
    section `optim`. Ranks of different pipeline stages are not compared with one another. Nothing waits for a device
    or for another rank; timers that are on at the log level of the loop synchronise as ever.

    Call it on every rank when the model and the optimizer are made, in the thread that trains.

    Args:
        config: What the model was made with, `TransformerConfig` or another `ModelParallelConfig`.
        optimizer: What `get_megatron_optimizer` returned; None where the loop times its step with timer `optimizer`.
        loader: What the loop makes its iterators of, such as a `DataLoader`, for the proof of a resume. Without it the
            one that `megatron.checkpointer(state=...)` has. It stays the object that it is.
        first_step: How many steps are complete already, as a resume knows it: steps then have global numbers in
            reports, and those that are done twice are compared. None where nothing is resumed; they are counted per
            attempt.

    Raises:
        ConfigError: An argument is wrong, or the process has a loop attached already.

    Example:
        handle = megatron.attach(config, optimizer, first_step=iteration)
        while handle.step < train_iters:
            train_step()
            if handle.should_stop():  # on all ranks behind the same step
                save()
                preemption.exit()
    """
    _check(config, optimizer)
    handle = Attached(first_step)
    try:
        handle.watch_timers(config, "timers")
        handle.watch_losses(config)
        if optimizer is not None:
            handle.watch_optimizer(optimizer)
        if first_step is not None:
            handle.guard.run(lambda: handle.prove(loader, optimizer))
    except BaseException:
        handle.detach()
        raise
    handle.declare_role()
    return handle


class Attached(AttachedLoop):
    """What is hung on one loop, and its steps so far; a context manager that detaches. The thread that trains."""

    caller, what_fails = "megatron", "heartbeats and sections"
    cure_of_second = "or attach once, with what all model chunks share"
    proof: MegatronProof | None = None
    """What proves the resumes of this loop."""

    def __init__(self, first_step: int | None = None) -> None:
        """Be the one of this process; raises ConfigError where there is another."""
        super().__init__(first_step)
        self.step_under_way = Step(first_step)
        self.spans = spans(self.step_under_way)
        self._parts = tuple(self.spans[name] for name in IN_STEP)
        self._update = self.spans["optim"]
        self._optimizer_depth = 0
        self._grad_norm: Any = None
        self._unfinished = 0
        self._has_stepped = False
        self._sampler: KernelSampler | None = None
        self._losses = StepLoss()
        self._hears_losses = False  # by `config.grad_scale_func`, so that a forward step need not tell them
        self.before_first_step: Callable[[], None] | None = None
        """What is called once, where the first step of this process begins, before it fetches a batch."""
        self.before_forward: Callable[[tuple[Any, ...]], None] | None = None
        """What the arguments of the first forward with gradients are given to, once: iterator and model."""
        self.on_loaded: Callable[[], None] | None = None
        """What is called where the timer of a load has ended."""
        self.is_on = not environ.is_disabled(environ.environment())
        """Whether anything is recorded at all."""
        lookup.recorder()  # the start-up begins, which may get stuck; where nothing is recorded, this says so
        if self.is_on:
            preemption.time_left()  # a signal in the start-up is answered behind the first step

    def should_stop(self) -> bool:
        """Tell whether to save and leave now: True on all ranks behind the same step. Once per step, on all ranks."""
        is_time = self.is_stop_agreed()
        if is_time:
            heartbeat.done()  # saving may take any time
        return is_time

    def is_stop_agreed(self) -> bool:
        """Tell the same for a loop whose save is a section, which has a deadline of its own."""
        return self._is_attached and not is_stepping() and preemption.check(StepsDone(self.step))

    # -- what is hung on

    def watch(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return it as section `fwd`, also where no timer is; it leaves nothing open if it raises."""
        if not self.is_on:
            return forward_step_func
        run, forward = self.guard.run, self.spans["fwd"]
        is_to_hear = numerics.is_on()

        @functools.wraps(forward_step_func)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            numerics.judge_steps()  # may raise: no hook is around it
            run(forward.begin)
            if self.before_forward is not None:
                run(lambda: self._tell_forward(args))
            try:
                result = forward_step_func(*args, **kwargs)
            except BaseException:
                self.drop()
                raise
            run(forward.end)
            return self._with_heard_loss(result) if is_to_hear and not self._hears_losses else result

        return forward_step

    def _tell_forward(self, given: tuple[Any, ...]) -> None:
        if self.before_forward is not None and self.step_under_way.has_gradients():
            before, self.before_forward = self.before_forward, None
            before(given)

    def _with_heard_loss(self, result: Any) -> Any:
        """Return what a forward step has given, its output and what makes a loss of it, with the latter heard."""
        is_known = isinstance(result, tuple) and len(result) == 2 and callable(result[1])
        if not (is_known and self.guard.is_on and self.step_under_way.has_gradients()):
            return result
        output, loss_func = result

        @functools.wraps(loss_func)
        def heard(*args: Any, **kwargs: Any) -> Any:
            found = loss_func(*args, **kwargs)
            if isinstance(found, tuple) and not kwargs:
                loss = found[0].detach()
                # Megatron divides it in place by what there is more of than one: per token it is a sum.
                self.guard.run(lambda: self._losses.add(loss if loss.device.type == "cpu" else loss.clone()))
            return found

        return output, heard

    def watch_losses(self, config: Any) -> None:
        """Hear of each loss where its backward begins, and Megatron asks for the scale of the gradients."""
        if not self.is_on or not numerics.is_on() or not hasattr(config, "grad_scale_func"):
            return
        self._hears_losses = True
        self.replace(config, "grad_scale_func", HeardScale(config.grad_scale_func, self._losses, self.guard))

    def watch_timers(self, owner: Any, name: str) -> None:
        """Put a delegate in the place of the timers that `owner` has under that name."""
        if not self.is_on:
            return
        heard: dict[str, Heard] = {
            timer: (self.spans[section].begin, self.spans[section].end) for timer, section in SECTION_OF.items()
        }
        heard[STEP] = self._step_begins, None
        heard[LOAD] = self.spans["resume"].begin, self._load_ends
        heard[INTERVAL] = self._set_before_first, None
        heard[OPTIMIZER] = self._optimizer_begins, self._optimizer_ends
        heard[SAVE] = self.spans["checkpoint"].begin, self._save_ends
        self.replace(owner, name, ObservingTimers(getattr(owner, name), heard, self.guard))

    def watch_optimizer(self, optimizer: Any) -> None:
        """Count the steps of a Megatron optimizer, and time them."""
        plain, begins, ends = optimizer.step, self._optimizer_begins, self._optimizer_ends

        @functools.wraps(plain)
        def step(*args: Any, **kwargs: Any) -> Any:
            watch = self._losses.watch
            if watch is not None and watch.is_waiting:
                numerics.judge_steps()  # may raise: no hook is around it
            begins()
            try:
                result = plain(*args, **kwargs)
            except BaseException:
                self._optimizer_depth = 0
                self.drop()
                raise
            # Of what `get_megatron_optimizer` gives: (whether it has stepped, norm of the gradients, number of zeros).
            self._grad_norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            ends()
            return result

        self.replace(optimizer, "step", step)

    def prove(self, loader: Any, optimizer: Any) -> None:
        """Leave a witness of each step from now on, and compare those that are repeated: their numbers are global."""
        saver = known_saver()
        skipped = (lambda: ()) if saver is None else (lambda: saver.skipped_steps)
        optimizers = [] if optimizer is None else [optimizer]
        sizes = [global_batch_size()]
        proof = megatron_proof(
            current(), optimizers, skipped, CURES, sizes, self.forwards, lambda: length_of(saved_objects())
        )
        if not self.is_on or proof is None:
            return
        self.proof = proof
        self.on_detach(proof.loop.close)
        loaders = [loader] if loader is not None else [] if saver is None else saver.loaders()
        if len(loaders) > 1:
            proof.why = "megatron.checkpointer() has several loaders: give attach() the one of the training as loader="
        elif loaders:
            restore = watch_loader(loaders[0], proof)
            if restore is None:
                proof.why = f"a {type(loaders[0]).__name__} cannot be watched: give attach() a DataLoader as loader="
            else:
                proof.is_known = True
                self.on_detach(restore)

    def forwards(self) -> tuple[int, bool]:
        """Return how many forwards with gradients have begun, and whether one is under way."""
        forward: Any = self.spans["fwd"]
        return forward.begun, bool(forward.depth)

    def go_to(self, step: int) -> None:
        """Go on behind another number of steps, as where the batches of one are left out."""
        if self.proof is not None:
            self.proof.drop()
        self.step = step
        if self.step_under_way.global_step is not None:
            self.step_under_way.global_step = step

    def declare_role(self) -> None:
        """Say what this rank does, which its process groups tell."""
        if self.is_on:
            self.guard.run(declare)

    def detach(self) -> None:
        """Leave Megatron as it was; ends the deadlines of this rank. May be repeated."""
        if self._is_attached:
            for span in self.spans.values():
                span.drop()
            if self._sampler is not None:
                self._sampler.stop()
        super().detach()

    def drop(self) -> None:
        """Close what is open of this step, after an exception; the step does not count."""
        for span in self._parts:
            span.drop()
        self.step_under_way.drop()
        self._losses.drop()
        if self.proof is not None:
            self.proof.drop()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        record(error)
        self.detach()

    # -- what the timers tell

    def _step_begins(self) -> None:
        if not self.step_under_way.has_gradients():
            return  # an evaluation
        for span in self._parts:
            if span.depth:
                span.drop()  # an exception has left it so
        self._optimizer_depth = 0  # as above
        if not self._has_stepped:
            self._look_for_optimizer()
        self.step_under_way.begin()
        self._set_before_first()

    def _set_before_first(self) -> None:
        if self.before_first_step is not None:
            before, self.before_first_step = self.before_first_step, None
            before()

    def _save_ends(self) -> None:
        self.spans["checkpoint"].end()
        if self.proof is not None:
            self.proof.loop.saved()

    def _load_ends(self) -> None:
        self.spans["resume"].end()
        if self.on_loaded is not None:
            self.on_loaded()

    # `Guard.run`, written out: each call that is spared in a step is worth more than two lines.

    def _optimizer_begins(self) -> None:
        depth = self._optimizer_depth = self._optimizer_depth + 1
        if depth == 1 and self.guard.is_on:
            try:
                if not self.step_under_way.is_open:
                    self.step_under_way.begin()  # of a loop whose forwards are not seen
                self._update.begin()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self.guard.fail(error)

    def _optimizer_ends(self) -> None:
        if not self._optimizer_depth:
            return
        depth = self._optimizer_depth = self._optimizer_depth - 1
        if depth:
            return
        # Whatever becomes of the rest: loops end by it.
        grad_norm, self._grad_norm = self._grad_norm, None
        under_way = self.step_under_way
        number = under_way.global_step if under_way.number is None else under_way.number()
        step = self.step = (self.step if number is None else number) + 1
        if under_way.global_step is not None:
            under_way.global_step = step
        if self.guard.is_on:
            try:
                if not self._has_stepped:
                    self._has_stepped = True
                    self._sampler = kernel_sampler(kernels_device())
                if self._sampler is not None:
                    self._sampler.step_ends()
                self._update.end()
                under_way.is_open = False
                if self.proof is not None and number is not None:
                    self.proof.step(step - 1)
                self._losses.end(None if number is None else step - 1, grad_norm)
                under_way.beat.end()
            except Exception as error:  # noqa: BLE001 - as above
                self.guard.fail(error)

    def _look_for_optimizer(self) -> None:
        self._unfinished += 1
        if self._unfinished > _MAX_STEPS_WITHOUT_OPTIMIZER:
            say_first(
                "megatron optimizer",
                "megatron: no step of an optimizer was seen, so no step is counted: attach(config, optimizer), or time "
                "the step of the loop with its timer 'optimizer'",
            )


class HeardScale:
    """`config.grad_scale_func` in which each loss is heard; a config that had none goes on as if it had none."""

    def __init__(self, plain: Callable[[Any], Any] | None, losses: StepLoss, guard: Guard) -> None:
        """Delegate to `plain`."""
        self.plain = plain
        self._losses, self._guard = losses, guard

    def __call__(self, loss: Any) -> Any:
        """Return it scaled."""
        # Without gradients it is the 1 by which Megatron learns the scale itself.
        if loss.requires_grad and loss.numel() == 1 and self._guard.is_on:
            try:
                self._losses.add(loss)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self._guard.fail(error)
        return loss if self.plain is None else self.plain(loss)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Be Megatron's own function in a copy of the configuration, perhaps in another process."""
        return itself, (self.plain,)


def global_batch_size() -> int | None:
    """Return how many samples a step has, where Megatron's calculator of micro-batches knows it."""
    ask = getattr(_calculator(), "get_current_global_batch_size", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, int) else None


def batch_ramp() -> list[int] | None:
    """Return by what the size of a step grows with the samples that are consumed; None where it does not."""
    names = ("start_global_batch_size", "batch_size_increment", "ramup_samples", "global_batch_size")
    found = [getattr(_calculator(), name, None) for name in names]
    return [int(one) for one in found if one is not None] if None not in found else None


def _calculator() -> Any:
    return getattr(module("core.num_microbatches_calculator"), "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)


def kernels_device() -> str | None:
    """Return on what device of the profiler Megatron's kernels run, None where they are not sampled."""
    import torch

    return "CUDA" if torch.cuda.is_available() else None


def declare() -> None:
    """Give this rank the role of its pipeline stage: only ranks of one stage are compared."""
    state = module("core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return
    if state.get_pipeline_model_parallel_world_size() > 1:
        set_role(f"stage-{state.get_pipeline_model_parallel_rank()}")
    if state.get_tensor_model_parallel_world_size() > 1:
        say_first(
            "megatron tensor parallel",
            "megatron: tensor parallelism waits for its group inside fwd and bwd, so the ranks of one group look "
            "alike: a slow group is found, the slow rank in it is not",
        )


def _check(config: Any, optimizer: Any) -> None:
    if not hasattr(config, "timers"):
        raise ConfigError(
            f"attach({type(config).__name__}): expected the configuration of the model, a ModelParallelConfig of "
            "megatron.core with a field `timers`; of a model pass get_model_config(model)"
        )
    if optimizer is not None and not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"attach(config, {optimizer!r}): expected what get_megatron_optimizer() returned, or None where the loop "
            "times its step with the timer 'optimizer'"
        )
