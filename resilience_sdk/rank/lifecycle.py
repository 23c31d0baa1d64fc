"""The start and end of recording in a process.

At most one session, begun by the first use, none in its children, ended on all ranks alike.

Nothing here may hurt the training: whatever fails turns into one line and a process that records nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilience_sdk import faults
from resilience_sdk.core import console, environ
from resilience_sdk.core.journal import Event
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings, load_settings, override_settings
from resilience_sdk.core.settings.parse import signal_name
from resilience_sdk.errors import DirectoryInUseError, ResilienceError, RunDirectoryError
from resilience_sdk.preemption.reasons import Asker
from resilience_sdk.rank import optimizer_hook, rehearsal
from resilience_sdk.rank import preemption as stopping
from resilience_sdk.rank.identity import find_identity, is_dataloader_worker
from resilience_sdk.rank.session import WatchedSession, handed_down_settings
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.recorder import Recorder
from resilience_sdk.system import installation
from resilience_sdk.system.kept_output import KeptOutput, keep_streams

_lock = threading.RLock()
_session: WatchedSession | None = None
_failed = False
_lacks_page = False
_has_failed_to_start = False
_output: KeptOutput | None = None


def current() -> WatchedSession | None:
    """Return the session of this process, if it has one."""
    return _session if _session is not None and _session.pid == os.getpid() else None


def lacks_page() -> bool:
    """Tell whether this process is a rank that nobody watches, without a place for its page or a run directory."""
    return _lacks_page


def has_failed_to_start() -> bool:
    """Tell whether this process was to record and could not, which has been said."""
    return _has_failed_to_start


def ensure_started(
    run_dir: str | None = None,
    settings: Settings | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    resumes: bool = False,
) -> WatchedSession | None:
    """Return the session of this process, starting it at the first call; None where nothing is recorded.

    Nothing is recorded with `RESILIENCE_DISABLE=1`, in a DataLoader worker, in a child forked by a rank, and
    when the start failed, which is said once. Raises ConfigError for bad explicit arguments only, and
    RunDirectoryError where `run_dir`, which the code names, cannot be used: training without the saves that it asks
    for would cost more than an error before the first step. What `resumes` also raises DirectoryInUseError where the
    user has named the directory in another way: in a sibling of it, it would start over.
    """
    global _session, _failed, _lacks_page, _has_failed_to_start
    if _session is not None or _failed:
        return current()
    env = environ.environment()
    if (why := _why_off(env)) is not None:
        _failed = True
        lookup.disable()
        if find_identity(env).local_rank == 0:  # one line, not one per rank
            console.say_once("disabled", f"switched off ({why}): nothing is watched, recorded or restarted")
        return None
    if is_dataloader_worker():
        return None
    if arguments or settings is None:
        settings = effective_settings(env, arguments)
    if env.get(environ.INTERNAL_PAGES) == "":
        _failed = _lacks_page = _has_failed_to_start = True  # the launcher has said why
        lookup.disable()
        stopping.listen_without_page(settings, env)
        return None
    with _lock:
        if _session is None and not _failed:
            session = None
            try:
                session = WatchedSession(settings, find_identity(env), env, run_dir, resumes=resumes)
                session.load_faults(env)
                session.start()
            except Exception as error:
                _failed = _has_failed_to_start = True
                lookup.disable()
                if session is not None:
                    session.withdraw()
                is_codes = run_dir is not None and isinstance(error, RunDirectoryError)
                if is_codes or (resumes and isinstance(error, DirectoryInUseError)):
                    raise
                why = str(error) if isinstance(error, (OSError, ResilienceError)) else repr(error)
                console.say_once("start", f"cannot start, this process is not watched: {why}")
                if isinstance(error, (OSError, RunDirectoryError)):
                    _lacks_page = True
                    stopping.listen_without_page(settings, env)
                return None
            _session = session
            if _output is not None:
                session.keep_output(_output)
            # Steps of optimizers are progress where the code does not beat, but only checks or saves, say.
            optimizer_hook.install(_pulse_of_optimizer, _take_back)
            if place := env.get(environ.REHEARSAL):
                rehearsal.observe(place, session)
            faults.started()
    return current()


def _why_off(env: Mapping[str, str]) -> str | None:
    """Say why this process is to record nothing, None where it is."""
    if environ.is_disabled(env):
        return environ.DISABLE
    return "the platform has no POSIX processes" if os.name != "posix" else installation.refusal()


def start_recording() -> Recorder | None:
    """Return the recorder for the blocks of this process: what `lanes.set_starter` wants."""
    session = ensure_started()
    if session is None:
        return None
    session.declare()
    return session.recorder


def bootstrap_worker() -> None:
    """Start watching a rank before its script runs: called by the launcher's workers and by `auto`.

    It declares nothing: the script may be any program, and may run for hours without what would be progress to us.
    """
    ensure_started()


def keep_output(screens: Mapping[int, int]) -> None:
    """Have what this rank prints go on into a file of the run directory where its reader goes away or a disk is full.

    For workers of our launcher, before their script runs: under another one the output is that one's. `screens`: where
    a descriptor (1, 2) went before it was led into a file, which takes what the file does not.
    """
    global _output
    env = environ.environment()
    if (run_dir := env.get(environ.RUN_DIR)) and environ.INTERNAL_ATTEMPT in env:
        _output = KeptOutput(RunDirectory(Path(run_dir)).unwritten_output(f"rank-{find_identity(env).rank}"), screens)
        keep_streams(_output)


def note_early_signal(number: int) -> None:
    """Note a signal that asked this process to leave before its script began: it is about to end by it."""
    session = current()
    if session is not None:
        session.journal.emit(Event.PREEMPT_NOTICE, source=signal_name(number), kind=Asker.SIGNAL.value, time_left_s=0.0)


def await_watch(patience_s: float) -> None:
    """Wait until whoever is to explain the end of this process would see it, at most so long."""
    session = current()
    if session is not None and session.config.foreign:
        session.await_watch(patience_s)


def record_exception(error: BaseException) -> None:
    """Leave the exception that ends this process for whoever explains it; never raises."""
    session = current()
    if session is not None and not isinstance(error, SystemExit):
        session.record_exception(error)


def leave_with(code: object) -> None:
    """Note what the script of this process leaves with: the code of its `SystemExit`, whatever Python takes as one."""
    session = current()
    if session is not None:
        session.leave_with(code & 0xFF if isinstance(code, int) else 0 if code is None else 1)


def _pulse_of_optimizer() -> bool:
    session = current()
    return session is None or session.optimizer_stepped()


def _take_back(pulses: int) -> None:
    session = current()
    if session is not None:
        session.recorder.take_back(pulses)


def effective_settings(env: Mapping[str, str], arguments: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of this process: those of its launcher, else the environment's; `arguments` win."""
    handed_down = handed_down_settings(env)
    if handed_down is not None:
        return override_settings(handed_down, arguments) if arguments else handed_down
    return load_settings(arguments=arguments, env=env, strict_env=False)


def _after_fork_in_child() -> None:
    """A forked child records nothing until it turns out to be a rank of its own."""
    global _session, _failed, _lacks_page, _has_failed_to_start, _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    parent, _session, _lacks_page, _has_failed_to_start = _session, None, False, False
    lookup.forget()
    if parent is not None:
        parent.orphan()
        # The child of a rank is a helper of that rank. A child of a process that only might have been one
        # (mp.start_processes with fork, after the parent used the SDK) may still become a rank.
        _failed = not parent.identity.provisional


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
