"""Fault tolerance callbacks of NVIDIA's extension, by their names and parameters: a script changes an import."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import faults
from resilience_sdk.adapters._base import HookedSection, Patches
from resilience_sdk.adapters.lightning import fit as roles
from resilience_sdk.adapters.lightning.background_look import BackgroundLook
from resilience_sdk.adapters.lightning.callback import SdkCallback
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.nvrx.client import ENDINGS, WorkloadAction, WorkloadControlRequest
from resilience_sdk.core import environ
from resilience_sdk.core.atomic_write import Version, version_of
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.plain_file import read_bytes
from resilience_sdk.core.run_directory import tell_finished
from resilience_sdk.hang.timeouts import LearnedTimeouts, Limit
from resilience_sdk.rank import Session
from resilience_sdk.recorder.page_reader import OpenSection

KINDS = ("random", "rank_killed", "rank_hung")


def _kind(value: Any) -> str:
    """Return the name of a fault, which may be a member of an enumeration."""
    return str(getattr(value, "name", value)).lower()


@attrs.frozen
class SimulatedFaultParams:
    """Which fault, and when: `base_delay` seconds after the start, and up to `rand_delay` more."""

    fault_type: str = attrs.field(converter=_kind)
    base_delay: float = attrs.field(converter=float)
    rand_delay: float = attrs.field(default=0.0, converter=float)
    rank_to_fail: int | None = None

    @fault_type.validator
    def _check(self, _attribute: Any, value: str) -> None:
        if value not in KINDS:
            raise ValueError(f"SimulatedFaultParams(fault_type={value!r}): expected one of {', '.join(KINDS)}")


def _params(given: SimulatedFaultParams | Mapping[str, Any]) -> SimulatedFaultParams:
    return given if isinstance(given, SimulatedFaultParams) else SimulatedFaultParams(**given)


@attrs.frozen
class PlannedFault:
    """What was drawn."""

    rank: int
    number: int
    delay_s: float

    @property
    def kind(self) -> str:
        """The kind of fault that it is of `resilience_sdk.faults`."""
        return "kill" if self.number == signal.SIGKILL else "hang"


def plan(params: SimulatedFaultParams, world_size: int, seed: str) -> PlannedFault:
    """Draw what is left open, equally on all ranks, which share the seed. Pure."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    kind = drawn.choice(KINDS[1:]) if params.fault_type == "random" else params.fault_type
    rank = drawn.randrange(world_size) if params.rank_to_fail is None else params.rank_to_fail
    number = signal.SIGKILL if kind == "rank_killed" else signal.SIGSTOP
    return PlannedFault(rank, number, params.base_delay + params.rand_delay * drawn.random())


_LOGGER = "nemo_logger.FaultToleranceCallback"
_PERIOD_S = 5.0
_MAX_BYTES = 8 << 20


class FaultToleranceCallback(SdkCallback):
    """NVIDIA's `FaultToleranceCallback`: heartbeats, sections, learned timeouts, and the flag of a finished training.

    Saving and resuming stay with your `ModelCheckpoint` and `fit(ckpt_path=...)`; `ResilienceCallback` does that too.

    Args:
        autoresume: Create the file that `FAULT_TOL_FINISHED_FLAG_FILE` names, and the run directory's own flag, when
            training is complete. One device alone does it, too.
        calculate_timeouts: Timeouts are learned from the first steps on and kept in the run directory. With False none
            is learned, and none of before counts: what was set holds, else the defaults (3600, 600 and 1800 s).
        simulated_fault_params: A fault to rehearse: `SimulatedFaultParams`, or a mapping of its fields.
        exp_dir: The run directory is `resilience` in it, where neither launcher nor environment names one.
        logger_name: The name of the logger that is written to: on rank 0 which timeouts hold, and what became of them,
            on the level INFO.
    """

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = _LOGGER,
    ) -> None:
        super().__init__(_run_dir_in(exp_dir), logger_name=logger_name)
        self.duties = frozenset({roles.BEAT, roles.SECTIONS} | ({roles.FINISH} if autoresume else set()))
        self._calculates = calculate_timeouts
        self._fault = None if simulated_fault_params is None else _params(simulated_fault_params)
        self._timer: threading.Timer | None = None
        self._look: BackgroundLook[_Timeouts] | None = None  # on the rank that logs
        self._seen: Version | None = None

    def begins(self, fit: Fit) -> None:
        """Log which timeouts hold, and arm the simulated fault in the first attempt."""
        fit.session.use_nvrx_words()
        if not self._calculates:
            fit.session.keep_timeouts()
        log = logging.getLogger(self._logger_name)
        if fit.trainer.is_global_zero and log.isEnabledFor(logging.INFO):
            session = fit.session
            self._seen = version_of(session.run_dir.timeouts)
            self._log_start(session)
            self._look = BackgroundLook(lambda: self._timeouts_of(session), _PERIOD_S, (self._seen, None))
        self._arm(fit)

    def steps(self, fit: Fit) -> None:
        """Log timeouts that are new, which another thread looks for."""
        if self._look is not None:
            self._log_news(self._look.newest)

    def ends(self, fit: Fit) -> None:
        """Log what was learned, and disarm the fault."""
        if self._look is not None:
            self._log_news(self._look.end())
            self._look = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, fit: Fit) -> None:
        if self._fault is None or fit.session.attempt > 0:
            return
        size = int(fit.trainer.world_size)
        fault, rank = plan(self._fault, size, fit.session.config.job), fit.trainer.global_rank
        if rank == 0 and not 0 <= fault.rank < size:
            say(f"simulated fault: nothing is struck, since of {size} ranks none is number {fault.rank}")
        if rank != fault.rank:
            return

        def strike() -> None:
            say(f"simulated fault: {signal.Signals(fault.number).name} to rank {rank} now")
            faults.on_strike(f"simulated_fault_params as {fault.kind}", None)  # in the journal: it counts as no failure
            os.kill(os.getpid(), fault.number)

        self._timer = threading.Timer(fault.delay_s, strike)
        self._timer.name, self._timer.daemon = "resilience-fault", True
        self._timer.start()

    def _log_start(self, session: Session) -> None:
        self._log(f"Fault tolerance dir: {session.run_dir.path}")
        timeouts = None if self._seen is None else self._shown(session)
        if timeouts is not None and self._calculates:
            self._log(f"Fault tolerance timeouts loaded: {timeouts}")
        shown = timeouts or ("not calculated yet." if self._calculates else self._shown(session))
        self._log(f"Fault tolerance client initialized. Timeouts: {shown}")

    def _log_news(self, found: _Timeouts) -> None:
        version, timeouts = found
        if version is None or version == self._seen:
            return
        self._seen = version
        if self._calculates and timeouts is not None:
            self._log(f"Updated FT timeouts. New values: {timeouts}")

    def _timeouts_of(self, session: Session) -> _Timeouts:
        version = version_of(session.run_dir.timeouts)
        return version, None if version is None else self._shown(session)

    def _shown(self, session: Session) -> str | None:
        """Return which timeouts hold, in the words of the original; None where they cannot be read."""
        book = self._book(session)
        return None if book is None else heartbeat_timeouts(book)

    def _book(self, session: Session) -> LearnedTimeouts | None:
        book = learned(session)
        if book is not None and not self._calculates:
            book.keep()
        return book

    def _log(self, text: str) -> None:
        logging.getLogger(self._logger_name).info("[FaultToleranceCallback@rank0] %s", text)


_Timeouts = tuple[Version | None, str | None]
"""Which version of the file it is, and the timeouts in it as the original shows them."""


def learned(session: Session) -> LearnedTimeouts | None:
    """Return what is set, and what the run directory holds of the timeouts of this training; None: it is unreadable."""
    path = session.run_dir.timeouts
    try:
        data = json.loads(read_bytes(path)[:_MAX_BYTES]) if path.exists() else None
    except (OSError, ValueError, RecursionError):
        return None
    world_size = session.identity.world_size
    return LearnedTimeouts.from_json(data, session.settings, script=session.config.script, world_size=world_size)


def heartbeat_timeouts(book: LearnedTimeouts) -> str:
    """Return the timeouts of heartbeats as the original shows them, in seconds. Pure."""
    first, later = book.startup_limit(), book.step_limit()
    return (
        f"HeartbeatTimeouts(initial={first.seconds:.2f}, subsequent={later.seconds:.2f}, "
        f"were_calculated={_is_calculated(first, later)})"
    )


def section_timeouts(book: LearnedTimeouts) -> str:
    """Return the timeouts of the three sections as the original shows them, in seconds; None: none yet. Pure."""
    limits = {name: book.limit(OpenSection(name, kind, 0, None, 1)) for name, kind in SECTION_KINDS.items()}
    shown = {name: None if limit is None else round(limit.seconds, 2) for name, limit in limits.items()}
    calculated = [name for name, limit in limits.items() if limit is not None and _is_calculated(limit)]
    outside = book.out_of_section_limit()
    return (
        f"SectionTimeouts(section={shown}, out_of_section={outside.seconds:.2f}, calculated_sections={calculated}, "
        f"is_out_of_section_calculated={_is_calculated(outside)})"
    )


def _is_calculated(*limits: Limit) -> bool:
    return all(limit.source == "learned" for limit in limits)


SECTION_KINDS = {"setup": "idle", "step": "compute", "checkpointing": "io"}
"""Of the setup no times are compared: ranks wait for one another in it."""


class ThreeSections(Patches):
    """The sections `setup`, `step` and `checkpointing` of one fit, hung on its trainer; for the thread that trains."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._sections = {name: HookedSection(name, kind) for name, kind in SECTION_KINDS.items()}
        self._depth = dict.fromkeys(SECTION_KINDS, 0)
        strategy = trainer.strategy
        for name in ("training_step", "validation_step"):
            self._time(strategy, name, "step")
        for name in ("save_checkpoint", "remove_checkpoint"):
            self._time(strategy, name, "checkpointing")
        self._time(strategy.checkpoint_io, "maybe_finalize_save_checkpoint", "checkpointing")
        self.on_detach(self._drop)
        self._begin("setup")

    def setup_ends(self) -> None:
        """End `setup`, if it is open: the first batch begins."""
        if self._depth["setup"]:
            self._end("setup")

    def _time(self, owner: Any, name: str, section: str) -> None:
        method = getattr(owner, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            self._begin(section)
            try:
                return method(*args, **options)
            finally:
                self._end(section)

        self.replace(owner, name, timed)

    def _begin(self, section: str) -> None:
        self._depth[section] += 1
        if self._depth[section] == 1:
            self._sections[section].begin()

    def _end(self, section: str) -> None:
        self._depth[section] -= 1
        if self._depth[section] == 0:
            self._sections[section].end()

    def _drop(self) -> None:
        for section in self._sections.values():
            section.drop()


class FaultToleranceSectionsCallback(FaultToleranceCallback):
    """NVIDIA's `FaultToleranceSectionsCallback`: the sections `setup`, `step` and `checkpointing`, and a policy.

    `setup` lasts from the setup of the fit to its first batch, `step` is the forward of a batch of training or
    evaluation, `checkpointing` what saves and removes checkpoints. Their deadlines are learned, or set by
    `section_timeouts` (`rank_section_timeouts` of NVIDIA's configuration). One fit after another, and one device, work.

    Args:
        autoresume: As for `FaultToleranceCallback`.
        calculate_timeouts: As for `FaultToleranceCallback`.
        simulated_fault_params: As for `FaultToleranceCallback`.
        exp_dir: As for `FaultToleranceCallback`.
        logger_name: As for `FaultToleranceCallback`.
        exc_handling_policy: Asked on the rank that raised, with the exception: what is done in the place of a restart.
            It takes `resilience run`; without a request, or where the policy fails, ranks are restarted as usual.
    """

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = _LOGGER,
        exc_handling_policy: Callable[[Exception], WorkloadControlRequest] | None = None,
    ) -> None:
        super().__init__(autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name)
        self.duties = self.duties - {roles.SECTIONS}
        self._policy = exc_handling_policy
        self._three: ThreeSections | None = None

    def begins(self, fit: Fit) -> None:
        """Begin `setup`."""
        others = sorted(set(fit.session.settings.section_timeouts) - set(SECTION_KINDS))
        if others and fit.trainer.is_global_zero:
            say_once(
                "section timeouts",
                f"section_timeouts has {', '.join(others)}: the sections of FaultToleranceSectionsCallback are "
                f"{', '.join(SECTION_KINDS)}, others are those of your own code",
            )
        super().begins(fit)
        self._three = ThreeSections(fit.trainer)

    def batch_begins(self, fit: Fit) -> None:
        """End `setup` with the first batch."""
        if self._three is not None:
            self._three.setup_ends()

    def fails(self, fit: Fit, error: Exception) -> None:
        """Ask the policy, and tell the launcher what it wants."""
        if self._policy is None:
            return
        try:
            request = self._policy(error)
        except Exception as failure:  # noqa: BLE001 - the user's code: the exception of the training is what counts
            say(f"exc_handling_policy failed, so the ranks are restarted as usual: {type(failure).__name__}: {failure}")
            return
        log = logging.getLogger(self._logger_name)
        log.debug("Exception handling policy callback returned: %s.", request)
        action = getattr(getattr(request, "action", None), "name", None)
        if action == WorkloadAction.Continue.name:
            return
        if action not in ENDINGS:
            say(
                f"exc_handling_policy returned {request!r}, so the ranks are restarted as usual: expected a "
                "WorkloadControlRequest"
            )
            return
        reason = f"{getattr(request, 'description', '')} ({action} of exc_handling_policy)"
        if not fit.session.ask_launcher(ENDINGS[action], reason):
            say(f"exc_handling_policy wants {action}, and nobody hears of it: that takes `resilience run`")
        if action == WorkloadAction.ShutdownWorkload.name:
            log.warning("Shutdown workload requested, so creating finished flag file.")
            _end_autoresume(fit.session)

    def ends(self, fit: Fit) -> None:
        """Leave the trainer as it was."""
        if self._three is not None:
            self._three.detach()
            self._three = None
        super().ends(fit)

    def _shown(self, session: Session) -> str | None:
        """Return which timeouts of sections hold, as the original shows them; None where they cannot be read."""
        book = self._book(session)
        return None if book is None else section_timeouts(book)


def _end_autoresume(session: Session) -> None:
    """Create the file that `FAULT_TOL_FINISHED_FLAG_FILE` names, so that a loop around the job ends.

    Not the flag of the run directory, which says that training is complete: 77 ends what knows our codes.
    """
    if environ.environment().get(environ.FINISHED_FLAG_FILE) != str(session.run_dir.finished):
        tell_finished()


def _run_dir_in(exp_dir: str | os.PathLike[str] | None) -> Path | None:
    env = environ.environment()
    if exp_dir is None or environ.INTERNAL_JOB in env or environ.RUN_DIR in env:
        return None
    return Path(exp_dir) / "resilience"
