"""`around(pretrain)`: the `pretrain()` of Megatron-LM, watched from around it and from within what it is given."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk import preemption
from resilience_sdk.adapters.megatron import attached, limits
from resilience_sdk.adapters.megatron.attached import Attached
from resilience_sdk.adapters.megatron.proof import (
    PRETRAIN_CURES,
    has_rates,
    megatron_proof,
    watch_iterator,
    watch_loader,
)
from resilience_sdk.adapters.megatron.step import KINDS
from resilience_sdk.adapters.nvrx.client import RankMonitorClient
from resilience_sdk.core import resume_limits
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event
from resilience_sdk.core.plain_file import plain
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.hang.timeouts import FALLBACK_INITIAL_S
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.reasons import Asker
from resilience_sdk.rank.all_ranks import finish
from resilience_sdk.rank.degraded import pageless_session
from resilience_sdk.rank.lifecycle import current
from resilience_sdk.rank.schedule_length import length_of
from resilience_sdk.recorder.lookup import find_own_block


class MonitorClient:
    """What Megatron-LM tells of its steps and saves, told on; deadlines are learned by us, so it has none to keep."""

    def __init__(self, handle: Attached) -> None:
        self.section_timeouts: dict[str, float | None] = {}
        self._handle = handle
        self._finalize = handle.spans["finalize"]
        self._has_deadline = False

    def init_workload_monitoring(self, *_: Any, **__: Any) -> None:
        """Do nothing: the monitor is there."""

    def start_section(self, name: str) -> None:
        """Begin a section of Megatron-LM: `setup`, `step` or `checkpointing`."""
        handle = self._handle
        if name == "step":
            handle.guard.run(handle.step_under_way.begin)
        elif name == "checkpointing" and not handle.spans["checkpoint"].depth:
            handle.guard.run(self._begin_finalize)  # a look at saves in the background, before each step

    def _begin_finalize(self) -> None:
        """Begin `finalize`, the first time with its deadline, unless the user has set one.

        The last look waits for the save to end, and may take as long as that: so what the many short ones teach is no
        deadline for it.
        """
        if not self._has_deadline:
            self._has_deadline = True
            block, session = find_own_block("finalize", KINDS["finalize"]), current()
            if block is not None and (session is None or "finalize" not in session.settings.section_timeouts):
                block.lane.recorder.retime(block, FALLBACK_INITIAL_S)
        self._finalize.begin()

    def end_section(self, name: str) -> None:
        """End it. A step ends with its optimizer."""
        if name == "checkpointing":
            self._handle.guard.run(self._finalize.end)

    def calculate_and_set_section_timeouts(
        self, selected_sections: Sequence[str] | None = None, calc_out_of_section: bool = True, **_: Any
    ) -> None:
        """Do nothing: they are learned all the time."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what is learned is in the run directory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore what NVRx has saved."""

    def shutdown_workload_monitoring(self) -> None:
        """Do nothing: `pretrain` ends the deadlines."""


class AgreedSignals:
    """What `get_signal_handler()` gives: Megatron-LM asks it once behind each iteration, on all ranks.

    Its own handler gathers the answers of all ranks each time; here they have agreed on a step before.
    """

    def __init__(self, plain: Any, handle: Attached) -> None:
        """Take the place of `plain`, which may be None."""
        self.plain = plain
        self.has_agreed = False
        """Whether all ranks have agreed to leave, and Megatron was told."""
        self._handle = handle
        preemption.time_left()  # before a loader forks workers, which would take the signals as theirs
        number = getattr(plain, "sig", None)
        if number is not None:  # else chained, Megatron's handler would only store the signal
            listening.take_over({int(number): getattr(plain, "original_handler", None)}, also=(int(number),))
            if getattr(plain, "_signal_received", False):  # in the start-up: nobody asks for it any more
                os.kill(os.getpid(), int(number))

    def signals_received(self) -> list[bool]:
        """Tell whether to save and leave: True on all ranks at the same iteration."""
        self.has_agreed = self.has_agreed or self._handle.is_stop_agreed()
        return [self.has_agreed]

    def release(self) -> bool:
        """Give Megatron's own handler its signal back, as its `release` does."""
        return bool(self.plain.release()) if self.plain is not None else False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


FORWARD = "forward_step_func"
PROVIDER = "_provider"
_NVRX = "nvidia_resiliency_ext"
_NVRX_OPTIONS = "--enable-ft-package, --inprocess-restart, or a save in the background"
_TRACKER = "latest_checkpointed_iteration.txt"
_MAX_DIGITS = 18
_LIMITS = ("train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples", "lr", "min_lr")
"""Arguments that schedules are made by."""
_MAKES_LOADER = "build_pretraining_data_loader"


def around(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron-LM's `pretrain` with the SDK around it: call it with the same arguments, on every rank.

    Delegates take the places of Megatron's timers, of its signal handler and of NVRx's client, until `pretrain` ends:
    those of the former two at once where a version has them before the call, all others when Megatron is initialised.
    That it is when it first calls `forward_step_func` or a provider, wrapped by the names of their parameters. Steps
    have the numbers of Megatron's iterations. When all ranks have agreed to stop, Megatron saves by its own means
    (`--save`) and the call leaves with `Preempted` (75), with or without `--exit-signal-handler`. So it does where
    Megatron leaves early with 0, by `--exit-interval` or `--exit-duration-in-mins`: the training is not finished. Exit
    codes 16 and 17 stay, and are explained.

    Raises:
        ConfigError: It has no parameter `forward_step_func` and no provider; or, when it is called, the process has a
            loop attached already.

    Example:
        pretrain = megatron.around(pretrain)
        pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    """
    signature = inspect.signature(pretrain) if callable(pretrain) else inspect.Signature()
    providers = [name for name in signature.parameters if name.endswith(PROVIDER)]
    if FORWARD not in signature.parameters or not providers:
        raise ConfigError(
            f"around({getattr(pretrain, '__qualname__', pretrain)!s}): expected Megatron-LM's pretrain(), with "
            f"parameters `{FORWARD}` and `..._provider`; put other wrappers around the result, and for a loop of your "
            "own use megatron.attach(config, optimizer)"
        )

    @functools.wraps(pretrain)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        with Attached() as handle:
            if not handle.is_on:
                return pretrain(*args, **kwargs)
            training = Pretraining(handle)
            training.starts()
            if callable(given.arguments.get(FORWARD)):
                # Newer versions need no provider of a model, and call that of the data on some ranks alone.
                given.arguments[FORWARD] = training.late(handle.watch(given.arguments[FORWARD]))
            for name in providers:
                if callable(given.arguments.get(name)):
                    given.arguments[name] = training.late(given.arguments[name])
            try:
                result = pretrain(*given.args, **given.kwargs)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] != _NVRX:
                    raise
                raise ConfigError(
                    f"Megatron-LM needs {error.name}, which is not installed ({_NVRX_OPTIONS} ask for it): leave the "
                    "option out, since resilience_sdk looks for hangs and restarts without it, start with "
                    "`resilience run --provide-nvrx`, or pip install nvidia-resiliency-ext"
                ) from error
            except SystemExit as error:
                if error.code in (None, 0):
                    training.leaves()
                raise
            training.ends()
            return result

    return run


class Pretraining:
    """One call of `pretrain`; of the thread that trains."""

    def __init__(self, handle: Attached) -> None:
        self._handle = handle
        self._has_begun = False
        self._args: Any = None
        self._signals: AgreedSignals | None = None
        self._has_loader = False

    def starts(self) -> None:
        """Take what newer versions have before the call: the load of a checkpoint in it is heard then."""
        known = attached.module("training.global_vars")
        if _is_initialised(known):
            self._handle.guard.run(lambda: self._take_globals(known))

    def late(self, given: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the script whose first call begins the rest: Megatron is initialised by then."""

        @functools.wraps(given)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._has_begun:
                self._handle.guard.run(self._begins)
            return given(*args, **kwargs)

        return call

    def leaves(self) -> None:
        """Raise `Preempted` where Megatron leaves with 0 before its last iteration: the training is to go on."""
        done, last = self._end()
        if last is None or done >= last:
            self._finish(done)
            return
        if getattr(self._args, "rank", 0) == 0:
            say(f"Megatron left after iteration {done} of {last}: not finished, so it leaves with 75, to be requeued")
            session = current()
            if session is not None:
                reason = f"{_planned_by(self._args)} after iteration {done} of {last}"
                session.journal.emit(
                    Event.PREEMPT_NOTICE, source="Megatron-LM", kind=Asker.PLANNED.value, reason=reason, rank=0
                )
        raise Preempted

    def ends(self) -> None:
        """Set the finished flag, where no launcher of ours does. Collective."""
        done, last = self._end()
        self._finish(done, is_complete=last is not None and done >= last)

    def _end(self) -> tuple[int, int | None]:
        """Return which iterations are done, and the last one; raise `Preempted` where the stop was agreed."""
        self._journal_saved()
        if self._signals is not None and self._signals.has_agreed:
            raise Preempted
        return self._progress()

    def _journal_saved(self) -> None:
        """Tell the journal, on one rank, after which iteration Megatron's own newest checkpoint was saved."""
        session, place = current(), getattr(self._args, "save", None)
        if session is None or not place or getattr(self._args, "rank", 0) != 0:
            return
        iteration = _saved_by_megatron(Path(place))
        if iteration is not None:
            session.journal.emit(Event.FRAMEWORK_CKPT, step=iteration, by="Megatron-LM", path=str(place))

    def _finish(self, done: int, *, is_complete: bool = True) -> None:
        self._handle.detach()
        session = current() or pageless_session(None, None, None, resumes=False)
        finish(session, done, is_complete=is_complete)  # also where this rank is not recorded: the others ask it

    def _progress(self) -> tuple[int, int | None]:
        loaded, last = getattr(self._args, "iteration", 0), getattr(self._args, "train_iters", None)
        done = max(self._handle.step, loaded if isinstance(loaded, int) else 0)
        if not isinstance(last, int):
            return done, None
        skipped = getattr(self._args, "iterations_to_skip", None) or ()
        return last if _only_skips_are_left(done, last, skipped) else done, last

    # -- once Megatron is initialised

    def _begins(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._handle.declare_role()
        if self._args is None:
            known = attached.module("training.global_vars")
            if not _is_initialised(known):
                self._args = getattr(known, "_GLOBAL_ARGS", None)
                attached.say_first(
                    "megatron globals",
                    "megatron: this version has no arguments and timers in megatron.training.global_vars, so steps and "
                    "preemption are not seen, only forwards; attach(config, optimizer) sees a loop on megatron.core",
                )
                return
            self._take_globals(known)
        self._take_client()

    def _take_globals(self, known: Any) -> None:
        self._args = known._GLOBAL_ARGS
        self._handle.step_under_way.number = self._iteration
        self._handle.on_loaded = self._loaded
        limits.note_arguments(known._GLOBAL_ARGS)
        self._handle.watch_timers(known, "_GLOBAL_TIMERS")
        self._take_signals(known)
        self._prove(known._GLOBAL_ARGS)

    def _prove(self, args: Any) -> None:
        """Leave a witness of each iteration, and compare those that are repeated."""
        handle = self._handle
        sizes = [getattr(args, name, None) for name in ("global_batch_size", "micro_batch_size")]
        limits_of = [getattr(args, name, None) for name in _LIMITS]
        proof = megatron_proof(
            *(current(), (), tuple, PRETRAIN_CURES, sizes, handle.forwards, lambda: length_of((), *limits_of)),
            only_in_forwards=True,
        )
        if proof is None:
            return
        handle.proof = proof
        handle.on_detach(proof.loop.close)
        handle.before_forward = self._forward_begins
        proof.why = "forward_step() reads no batch of the iterator that Megatron gives it"
        known = attached.module("training.training")
        if callable(getattr(known, _MAKES_LOADER, None)):
            handle.replace(known, _MAKES_LOADER, self._loader_watched(getattr(known, _MAKES_LOADER)))

    def _loader_watched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Look at the batches of the loader that is made first, which is that of the training."""
        handle, is_first = self._handle, [True]

        def watch(made: Any) -> None:
            from torch.utils.data import DataLoader

            # One of `--dataloader-type external` is what the script has made, and an iterator.
            restore = None
            if handle.proof is not None and isinstance(made, DataLoader):
                restore = watch_loader(made, handle.proof)
            if restore is not None:
                self._has_loader = True
                handle.on_detach(restore)

        @functools.wraps(plain)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            if is_first:
                is_first.clear()
                handle.guard.run(lambda: watch(made))
            return made

        return make

    def _forward_begins(self, given: tuple[Any, ...]) -> None:
        """Know the optimizer, whose function scales the loss, and an iterator that is made of no loader."""
        proof, handle = self._handle.proof, self._handle
        if proof is None or len(given) < 2:
            return
        scale = getattr(getattr(given[1], "config", None), "grad_scale_func", None)
        optimizer = getattr(scale, "__self__", None)
        if has_rates(optimizer):
            proof.loop.watch_optimizers([optimizer])
        if not self._has_loader and given[0] is not None:
            restore = watch_iterator(given[0], proof.read)
            if restore is not None:
                handle.on_detach(restore)

    def _loaded(self) -> None:
        """Keep the generators as Megatron has loaded them, for the first step: its iterators draw in between."""
        if not _loads_iterations(self._args):
            return
        resume_limits.resumed()
        limits.note_batch(self._args)
        if not getattr(self._args, "no_load_rng", False):
            from resilience_sdk.checkpoint.state import capture_rng, restore_rng  # imports torch

            # Iterators of loaders draw nothing on a device.
            states = {name: one for name, one in capture_rng().items() if not name.startswith("cuda")}
            self._handle.before_first_step = functools.partial(restore_rng, states)

    def _iteration(self) -> int | None:
        number = getattr(self._args, "curr_iteration", None)
        return number if isinstance(number, int) else None

    def _take_signals(self, known: Any) -> None:
        if not hasattr(self._args, "exit_signal_handler") or not hasattr(known, "_GLOBAL_SIGNAL_HANDLER"):
            attached.say_first(
                "megatron signals",
                "megatron: this version has no exit_signal_handler, so nobody saves when the job is asked to leave; "
                "call should_stop() of megatron.attach(config, optimizer) in the loop",
            )
            return
        args = self._args
        if not getattr(args, "save", None):
            attached.say_first(
                "megatron save", "megatron: without --save nothing is saved when the job is asked to leave"
            )
        self._signals = AgreedSignals(known._GLOBAL_SIGNAL_HANDLER, self._handle)
        self._handle.on_detach(listening.give_back)
        self._handle.replace(known, "_GLOBAL_SIGNAL_HANDLER", self._signals)
        # The loop asks the handler only where this is set, and it reads that from the arguments at each iteration:
        # there is no other place. A checkpoint of meanwhile holds True as well; it is put back when `pretrain` ends.
        self._handle.replace(args, "exit_signal_handler", True)

    def _take_client(self) -> None:
        ft = attached.module("training.ft_integration")
        if ft is None or not hasattr(ft, "_GLOBAL_RANK_MONITOR_CLIENT"):
            return
        if isinstance(ft._GLOBAL_RANK_MONITOR_CLIENT, RankMonitorClient):
            return  # ours by the name of NVRx's: its sections are the SDK's
        if ft._GLOBAL_RANK_MONITOR_CLIENT is not None:
            attached.say_first(
                "megatron client",
                "megatron: --enable-ft-package has started NVRx's own client, whose sections stay with it; leave the "
                "option out, the hangs that it looks for are looked for here",
            )
            return
        self._handle.replace(ft, "_GLOBAL_RANK_MONITOR_CLIENT", MonitorClient(self._handle))


def _is_initialised(known: Any) -> bool:
    """Tell whether Megatron-LM's globals hold its arguments and its timers."""
    return all(getattr(known, name, None) is not None for name in ("_GLOBAL_ARGS", "_GLOBAL_TIMERS"))


def _loads_iterations(args: Any) -> bool:
    """Tell whether a checkpoint was loaded that this training goes on from."""
    iteration = getattr(args, "iteration", None)
    return isinstance(iteration, int) and iteration > 0 and not getattr(args, "finetune", False)


def _planned_by(args: Any) -> str:
    """Return the options by which Megatron may leave early, as they are set. Pure."""
    names = ("exit_interval", "exit_duration_in_mins")
    given = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names if getattr(args, name, None)]
    return " or ".join(given) if given else "an exit of its own"


def _saved_by_megatron(place: Path) -> int | None:
    """Return the iteration in Megatron's tracker file; None where there is none that can be read."""
    try:
        with open(place / _TRACKER, encoding="ascii", opener=plain) as file:
            text = file.read(_MAX_DIGITS).strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None  # else "release", which has no iteration


def _only_skips_are_left(done: int, last: int, skipped: Collection[int]) -> bool:
    """Tell whether no iteration behind `done` is trained (`--iterations-to-skip`, of which no timer is heard).

    Megatron-LM counts them from 0, newer versions from 1.
    """
    return done < last and any(all(at + first in skipped for at in range(done, last)) for first in (0, 1))
