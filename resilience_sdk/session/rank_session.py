"""One rank's side of a job: page, stack dumps, helper thread, journal, monitor."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from resilience_sdk import console, environ, faults, hostinfo, lanes
from resilience_sdk.attribution.taxonomy import meaning
from resilience_sdk.errors import ResilienceError
from resilience_sdk.events import Event
from resilience_sdk.lanes import Recorder
from resilience_sdk.monitor.spawn import MonitorWatch, ensure_monitor, is_alive
from resilience_sdk.numerics import watching as numerics
from resilience_sdk.numerics.recording import Attempt
from resilience_sdk.preemption import rank as preemption
from resilience_sdk.preemption.side import Side
from resilience_sdk.rank_page import PageReader, RankPage, job_page_directory, page_stem, snapshot_to_json
from resilience_sdk.rank_page import layout as at
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.session import exceptions, stopping
from resilience_sdk.session.base import Session
from resilience_sdk.session.error_file import write_error_file
from resilience_sdk.session.helper import HelperThread, completed_collectives
from resilience_sdk.session.identity import Identity, fallback_job_key, process_of_rank
from resilience_sdk.session.job import join_job
from resilience_sdk.session.rank_journal import rank_journal
from resilience_sdk.session.unwatched import remove_own, remove_unwatched
from resilience_sdk.settings import Settings, settings_from_json
from resilience_sdk.straggler import listening

_LAST_ROUND_S = 0.5  # for what the helper thread is at when the process ends; it asks no network


class WatchedSession(Session):
    """One rank's side of a job, from its first use to the end of the process."""

    recorder: Recorder

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        env: Mapping[str, str],
        explicit_run_dir: str | None,
        *,
        resumes: bool = False,
    ) -> None:
        """Open everything that a rank owns. Raises OSError or ResilienceError; `ensure_started` handles both."""
        self.pid = os.getpid()
        self._began_unix = time.time()
        self.identity = identity
        self.attempt = environ.attempt(env)
        self._script = script_name()
        job = environ.job_key(env, fallback_job_key(env))
        internal = env.get(environ.INTERNAL_PAGES)
        self.pages = Path(internal) if internal else job_page_directory(job, env)
        if not identity.provisional and (other := process_of_rank(self.pages, self.attempt, identity.rank)):
            raise ResilienceError(f"rank {identity.rank} is process {other} already, whose environment this one has")
        self.config = join_job(self.pages, job, self._script, settings, env, explicit_run_dir, resumes=resumes)
        self.settings = settings_from_json(self.config.settings)
        self.run_dir = RunDirectory.create(self.config.run_dir, group_readable=self.settings.group_readable)
        self.may_resume = self.config.run_named or self.attempt > 0
        self.journal = rank_journal(self.run_dir, job, self.attempt, identity.rank)
        self._stem = self.pages / page_stem(self.attempt, identity.rank, self.pid)
        self._collectives = 0
        self._uses_sdk = False
        # Ranks start together; the first one on the node starts the monitor, the others see that it is there.
        self._monitor = MonitorWatch(self.pages, delay_s=0.0 if identity.local_rank == 0 else 1.0)
        self._has_no_monitor = False
        self._helper = HelperThread(self._stem, periodic=self._tick, signalled=stopping.signalled)
        self._catches_crashes = False
        self._dumps: TextIO | None = self._register_dumps()
        # Last, because what can fail is behind us: whoever has a page is watched.
        self.page = self._create_page()
        self.recorder = Recorder(self.page, settle=self.settle)
        self.pages_key = _key_of(self.pages)

    def load_faults(self, env: Mapping[str, str]) -> None:
        """Arm the faults that the environment asks for, if they are this rank's; a bad one is said, not raised."""
        faults.on_change = lanes.forget
        try:
            faults.load(env.get(environ.FAULT, ""), self.identity.rank, self.attempt)
        except ResilienceError as error:
            console.say_once("fault", f"no fault is injected, it is ignored: {error}")

    def start(self) -> None:
        """Begin to serve: helper thread, journal line, clean-up at the end of the process."""
        self.journal.emit(
            Event.RANK_START,
            pid=self.pid,
            local_rank=self.identity.local_rank,
            world_size=self.identity.world_size,
            provisional=self.identity.provisional,
            script=self._script,
            page=self.page.path.name,
        )
        listening.begin(self.run_dir.path, self.attempt)
        self._helper.start()
        preemption.listen(self._preemption_side())
        numerics.listen(self._numerics_side())
        atexit.register(self._at_exit)
        # Children of multiprocessing end without atexit; their finalizers do run.
        multiprocessing.util.Finalize(self, self._at_exit, exitpriority=0)
        exceptions.chain_thread_hook(self.record_thread_exception)
        if environ.INTERNAL_ATTEMPT not in environ.environment():  # our launcher's workers record what ends them
            exceptions.chain_excepthook(self.record_exception)

    def _preemption_side(self) -> Side:
        env = environ.environment()
        coordination = stopping.Coordination(self.pages, self.attempt, env, self._find_monitor)
        return Side(
            words=self.page.words,
            pages=self.pages,
            journal=self.journal,
            attempt=self.attempt,
            signals=stopping.signal_numbers(self.settings),
            grace_s=self.settings.preempt_time,
            wakeup=lambda: self._helper.descriptor,
            signal_grace_s=stopping.signal_grace_s(env),
            request_file=self.run_dir.preempt,
            began_unix=self._began_unix,
            is_alone=stopping.has_no_peers(self.identity.world_size, self.identity.provisional, env),
            has_coordinator=coordination.by_monitor,
            first_check=coordination.first_check,
            stopping=stopping.StopTeller(self.run_dir.journal, self.attempt, env, lambda: self.identity.rank == 0),
        )

    def _numerics_side(self) -> numerics.Side:
        return numerics.Side(
            run_dir=self.run_dir.path,
            journal=self.journal,
            attempt=lambda: Attempt(self.config.job, self.attempt, self.identity.world_size, hostinfo.host_name()),
            rank=lambda: self.identity.rank,
            step=self._step,
            explain=meaning,
            pages=self._own_page,
            restarts=environ.restarts(environ.environment(), self.settings.max_restarts),
            skip_batches=self.settings.rollback_skip_batches,
        )

    def _own_page(self) -> dict[int, dict[str, Any]]:
        reader = PageReader(self.page.path)
        try:
            snapshot = reader.snapshot()
        finally:
            reader.close()
        return {} if snapshot is None else {self.identity.rank: snapshot_to_json(snapshot)}

    def _step(self) -> tuple[int, bool]:
        lane = self.recorder.owner
        return lane.current_step(), lane.step_is_global

    def _find_monitor(self) -> bool | None:
        """Tell whether there is a monitor; None as long as one may still come. Any thread."""
        if is_alive(self.pages):
            return True
        return False if self._has_no_monitor or stopping.knows_no_monitor(self.pages, self.attempt) else None

    def settle(self) -> bool:
        """Correct a provisional identity once a process group is there; tell whether it is final now."""
        if not self.identity.provisional:
            return True
        if not super().settle():
            return False
        me = self.identity
        self.page.set_identity(me.rank, me.local_rank, me.world_size)
        self.page.set_flag(at.FLAG_PROVISIONAL, False)
        self.load_faults(environ.environment())
        return True

    def declare(self) -> None:
        """Note that the user's code uses the SDK, so that a first beat is to be expected."""
        if not self._uses_sdk:
            self._uses_sdk = True
            self.page.set_flag(at.FLAG_DECLARED)

    def optimizer_stepped(self) -> None:
        """Count an optimizer step as progress, unless the script beats by itself."""
        words = self.page.words
        if words[at.W_BEAT_SOURCE] == at.BEATS_USER or self.pid != os.getpid():
            return
        words[at.W_BEAT_SOURCE] = at.BEATS_OPTIMIZER
        self.recorder.pulse(None)

    def record_exception(self, error: BaseException) -> None:
        """Leave the exception that ends this rank for whoever explains it; never raises."""
        with contextlib.suppress(Exception):
            self.page.words[at.W_EXIT_STATE] = at.EXIT_ERROR
            step = self.recorder.owner.current_step()
            exceptions.write(self._stem.with_suffix(".error.json"), error, step if step >= 0 else None)
            write_error_file(error)
            if self.config.foreign and not is_alive(self.pages):
                ensure_monitor(self.pages)  # ranks that die at once may all be gone before anybody started one

    def record_thread_exception(self, error: BaseException, thread: str) -> None:
        """Leave the exception that ended a thread: the rank goes on, and may end or hang for it; never raises."""
        with contextlib.suppress(Exception):
            step = self.recorder.owner.current_step()
            path = self._stem.with_suffix(".thread.json")
            exceptions.write(path, error, step if step >= 0 else None, thread=thread)

    def orphan(self) -> None:
        """Give everything up in a forked child: it belongs to the parent."""
        self.recorder.orphan()
        if self._catches_crashes:
            faulthandler.disable()  # the crash of a DataLoader's worker is not the rank's

    def withdraw(self) -> None:
        """Take the page back when the start fails: one that never moves would look like a rank that hangs."""
        with contextlib.suppress(OSError):
            self.page.path.unlink()

    # -- parts

    def _create_page(self) -> RankPage:
        page = RankPage.create(
            self._stem.with_suffix(".page"),
            pid=self.pid,
            start_ticks=hostinfo.process_start_ticks(self.pid) or 0,
            rank=self.identity.rank,
            local_rank=self.identity.local_rank,
            world_size=self.identity.world_size,
            attempt=self.attempt,
            created_ns=time.monotonic_ns(),
            facts={"host": hostinfo.host_name(), "script": self._script},
        )
        page.set_flag(at.FLAG_PROVISIONAL, self.identity.provisional)
        page.set_flag(at.FLAG_DUMPS, self._dumps is not None)
        # Whoever sets a time for the first beat expects one.
        page.set_flag(at.FLAG_DECLARED, self.settings.initial_heartbeat_timeout is not None)
        return page

    def _register_dumps(self) -> TextIO | None:
        """Install the handlers that write a stack in C: of the main thread on the dump signal, hung or not; of the
        thread that crashes on a fatal signal (SIGSEGV, SIGBUS, SIGABRT, ...), unless the user has that already.

        Not those of other threads: reading the frames of a thread that runs ends the process now and then.
        """
        number = self.settings.dump_signal
        if not number or not hasattr(faulthandler, "register"):
            return None
        file = open(self._stem.with_suffix(".stack"), "x", opener=_private)  # noqa: SIM115 - open to the end
        faulthandler.register(number, file=file, all_threads=False, chain=False)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=file, all_threads=False)  # the process still dies of that signal
            self._catches_crashes = True
        return file

    def _tick(self) -> None:
        """Run about every 2 s on the helper thread."""
        if self.page.words[at.W_EXIT_STATE] != at.EXIT_RUNNING:
            return
        preemption.look()
        try:
            self._monitor.keep_alive()
        except OSError as error:
            if self.page.words[at.W_EXIT_STATE] != at.EXIT_RUNNING:
                return  # the files may be gone by now
            self._has_no_monitor = True
            if console.say_once("monitor", f"no monitor can be started, hangs are not detected: {error}"):
                self.journal.emit(Event.DEGRADED, what="monitor", why=str(error))
        if self.recorder.lost and console.say_once("lost", f"neither timed nor guarded: {self.recorder.lost}"):
            self.journal.emit(Event.DEGRADED, what="sections", why=self.recorder.lost)
        if self.identity.provisional:
            self.settle()
        words = self.page.words
        if words[at.W_BEAT_SOURCE] in (at.BEATS_NONE, at.BEATS_COLLECTIVES) and not self._uses_sdk:
            completed = completed_collectives()
            if completed > self._collectives:
                self._collectives = words[at.W_COLLECTIVES] = completed
                words[at.W_BEAT_SOURCE] = at.BEATS_COLLECTIVES
                self.recorder.pulse(None)

    def _at_exit(self) -> None:
        if self.pid != os.getpid() or self.page.words[at.W_EXIT_STATE] != at.EXIT_RUNNING:
            return
        error = exceptions.ended_by()
        numerics.close(wait=error is None)
        listening.close(_LAST_ROUND_S)
        if error is not None:
            self.record_exception(error)
        else:
            self.page.words[at.W_EXIT_STATE] = at.EXIT_CLEAN
        self._helper.close(patience_s=_LAST_ROUND_S)
        # Not where somebody may start the ranks again: the next attempt goes on in the same run directory.
        is_clean = self.page.words[at.W_EXIT_STATE] == at.EXIT_CLEAN
        if self.config.foreign and (not self.config.parent_pid or (is_clean and self.identity.world_size == 1)):
            remove_unwatched(self.pages, self._stem)
        elif self.config.foreign and self._find_monitor() is False:
            remove_own(self.pages, self._stem)


def _key_of(pages: Path) -> str:
    place = pages.stat()
    return f"{hostinfo.boot_id()}-{place.st_dev}-{place.st_ino}"


def script_name() -> str:
    """Return the user's script as it was named, or `python` in an interactive process."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c") else "python"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
