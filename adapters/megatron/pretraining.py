"""`around(pretrain)`: the `pretrain()` of Megatron-LM, watched from around it and from within what it is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from resilience_sdk.adapters.megatron import surroundings
from resilience_sdk.adapters.megatron.attached import Attached
from resilience_sdk.adapters.megatron.client import MonitorClient
from resilience_sdk.adapters.megatron.signals import AgreedSignals
from resilience_sdk.console import say
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.session.ending import finish
from resilience_sdk.session.lifecycle import current
from resilience_sdk.session.pageless import pageless_session

FORWARD = "forward_step_func"
PROVIDER = "_provider"


def around(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron-LM's `pretrain` with the SDK around it: call it with the same arguments, on every rank.

    Its `forward_step_func` and its providers are wrapped by the names of their parameters. When the first of them is
    called, Megatron is initialised: then delegates take the places of its timers, of its signal handler and of NVRx's
    client, until `pretrain` ends. Steps have the numbers of Megatron's iterations. When all ranks have agreed to stop,
    Megatron saves by its own means (`--save`) and the call leaves with `Preempted` (75), with or without
    `--exit-signal-handler`. So it does where Megatron leaves early with 0, by `--exit-interval` or
    `--exit-duration-in-mins`: the training is not finished. Exit codes 16 and 17 stay, and are explained.

    Raises:
        ConfigError: It has no parameter `forward_step_func` and no provider; or, when it is called, the process has a
            loop attached already.

    Example:
        pretrain = megatron.around(pretrain)
        pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
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
            if callable(given.arguments.get(FORWARD)):
                # The newest Megatron-LM needs no provider of a model, and calls that of the data on some ranks alone.
                given.arguments[FORWARD] = training.late(handle.watch(given.arguments[FORWARD]))
            for name in providers:
                if callable(given.arguments.get(name)):
                    given.arguments[name] = training.late(given.arguments[name])
            try:
                result = pretrain(*given.args, **given.kwargs)
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
        if self._signals is not None and self._signals.has_agreed:
            raise Preempted
        done, last = self._progress()
        if last is None or done >= last:
            self._finish(done)
            return
        if getattr(self._args, "rank", 0) == 0:
            say(f"Megatron left after iteration {done} of {last}: not finished, so it leaves with 75, to be requeued")
        raise Preempted

    def ends(self) -> None:
        """Set the finished flag, where no launcher of ours does. Collective."""
        if self._signals is not None and self._signals.has_agreed:
            raise Preempted
        done, last = self._progress()
        self._finish(done, is_complete=last is not None and done >= last)

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
        self._handle.starts()
        known = surroundings.module("training.global_vars")
        self._args = getattr(known, "_GLOBAL_ARGS", None)
        if known is None or self._args is None or getattr(known, "_GLOBAL_TIMERS", None) is None:
            surroundings.say_first(
                "megatron globals",
                "megatron: this version has no arguments and timers in megatron.training.global_vars, so steps and "
                "preemption are not seen, only forwards; attach(config, optimizer) sees a loop on megatron.core",
            )
            return
        self._handle.number_by(self._iteration)
        self._handle.watch_timers(known, "_GLOBAL_TIMERS")
        self._take_signals(known)
        self._take_client()

    def _iteration(self) -> int | None:
        number = getattr(self._args, "curr_iteration", None)
        return number if isinstance(number, int) else None

    def _take_signals(self, known: Any) -> None:
        if not hasattr(self._args, "exit_signal_handler") or not hasattr(known, "_GLOBAL_SIGNAL_HANDLER"):
            surroundings.say_first(
                "megatron signals",
                "megatron: this version has no exit_signal_handler, so nobody saves when the job is asked to leave; "
                "call should_stop() of megatron.attach(config, optimizer) in the loop",
            )
            return
        args, asked = self._args, self._args.exit_signal_handler
        if not getattr(args, "save", None):
            surroundings.say_first(
                "megatron save", "megatron: without --save nothing is saved when the job is asked to leave"
            )
        plain = known._GLOBAL_SIGNAL_HANDLER
        signals = self._signals = AgreedSignals(plain, self._handle.is_stop_agreed)
        known._GLOBAL_SIGNAL_HANDLER, args.exit_signal_handler = signals, True

        def restore() -> None:
            if known._GLOBAL_SIGNAL_HANDLER is signals:
                known._GLOBAL_SIGNAL_HANDLER, args.exit_signal_handler = plain, asked

        self._handle.on_detach(restore)

    def _take_client(self) -> None:
        ft = surroundings.module("training.ft_integration")
        if ft is None or not hasattr(ft, "_GLOBAL_RANK_MONITOR_CLIENT"):
            return
        if ft._GLOBAL_RANK_MONITOR_CLIENT is not None:
            surroundings.say_first(
                "megatron client",
                "megatron: --enable-ft-package has started NVRx's own client, whose sections stay with it; leave the "
                "option out, the hangs that it looks for are looked for here",
            )
            return
        client = MonitorClient(self._handle.step_under_way.begin, self._handle.spans, self._handle.guard)
        ft._GLOBAL_RANK_MONITOR_CLIENT = client

        def restore() -> None:
            if ft._GLOBAL_RANK_MONITOR_CLIENT is client:
                ft._GLOBAL_RANK_MONITOR_CLIENT = None

        self._handle.on_detach(restore)


def _only_skips_are_left(done: int, last: int, skipped: Collection[int]) -> bool:
    """Tell whether no iteration behind `done` is trained (`--iterations-to-skip`, of which no timer is heard).

    Megatron-LM counts them from 0, newer versions from 1.
    """
    return done < last and any(all(at + first in skipped for at in range(done, last)) for first in (0, 1))
