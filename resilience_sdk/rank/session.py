"""The session of one rank: page, stack dumps, helper thread, journal and monitor."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import multiprocessing.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilience_sdk import faults
from resilience_sdk.attribution.taxonomy import meaning
from resilience_sdk.core import console, environ, job_config, resume_limits
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.json_records import from_values, to_text
from resilience_sdk.core.plain_file import open_plain, read_text
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings, settings_from_json
from resilience_sdk.errors import ConfigError, ResilienceError
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.monitor.spawn import MonitorWatch, all_locks, await_look, ensure_monitor, is_alive, read_state
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.numerics.recording import AttemptPlace
from resilience_sdk.preemption import listener as preemption
from resilience_sdk.preemption.context import PreemptionContext
from resilience_sdk.rank import crash_dumps, device_memory, exceptions, optimizer_hook
from resilience_sdk.rank import preemption as stopping
from resilience_sdk.rank.exceptions import write_error_file
from resilience_sdk.rank.held import ExitTeller, call_at_shutdown
from resilience_sdk.rank.helper_thread import HelperThread, completed_collectives
from resilience_sdk.rank.identity import (
    Identity,
    fallback_job_key,
    group_identity,
    join_job,
    process_of_rank,
    rank_journal,
)
from resilience_sdk.recorder import lookup, page_directory, witness_ring
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.page_directory import job_page_directory, page_stem
from resilience_sdk.recorder.page_reader import PageReader, snapshot_to_json
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Recorder
from resilience_sdk.recorder.witness_ring import Witnesses, WitnessRing
from resilience_sdk.straggler import callbacks, kernels
from resilience_sdk.system import gloo_teardown, hostinfo, linux, same_device
from resilience_sdk.system.kept_output import KeptOutput


class Session:
    """Who this rank is, where its job writes, and with which settings; made by `lifecycle` or `degraded`."""

    identity: Identity
    attempt: int
    config: JobConfig
    settings: Settings
    run_dir: RunDirectory
    journal: Journal
    may_resume: bool
    """Whether what is in the run directory is this job's to go on from."""
    recorder: Recorder | None = None
    """None where nothing is timed or guarded."""
    pages_key: str | None = None
    """Equal for ranks whose pages one monitor reads; None for a rank without a page."""

    def declare(self) -> None:
        """Note that the user's code uses the SDK, so that a first beat is to be expected."""

    def keep_timeouts(self) -> None:
        """Have the monitor learn no deadline from this rank: what is set holds, else the defaults."""

    def use_nvrx_words(self) -> None:
        """Have the lines of NVRx and torchrun, for which its users search, printed beside ours."""

    def ask_launcher(self, action: str, reason: str, advice: str = "") -> bool:
        """Ask the launcher to do that in the place of a restart, see `EndingRequest`; tell whether it will hear of it.

        It counts when this attempt ends by a failure. Never raises.
        """
        return False

    def make_witness_ring(self, facts: int) -> WitnessRing | None:
        """Return where this rank leaves its steps, made once; None where there is no place for it. Never raises."""
        return None

    def find_witnesses(self) -> Witnesses | None:
        """Return what the attempt before has left of this rank's steps; None where nothing is known. Never raises."""
        return None

    def says_for_node(self, what: str) -> bool:
        """Tell whether this rank says it, where each rank of a node may have the same to say: once in an attempt."""
        return self.identity.local_rank == 0

    def settle(self) -> bool:
        """Correct a provisional identity once a process group is there; tell whether it is final now."""
        if not self.identity.provisional:
            return True
        found = group_identity()
        if found is None:
            return False
        local_rank = self.identity.local_rank if self.identity.world_size > 1 else found.local_rank
        self.identity = Identity(found.rank, local_rank, found.world_size, provisional=False)
        self.journal.rank = found.rank
        console.bind(rank=found.rank)
        return True


def handed_down_config(env: Mapping[str, str]) -> JobConfig | None:
    """Return the job as its launcher describes it; None where it does not, or what it says is damaged, which is said.

    Without what only the launcher itself needs: the settings that are secrets.
    """
    text = env.get(environ.INTERNAL_CONFIG)
    if not text:
        return None
    try:
        return from_values(JobConfig, json.loads(text))
    except ValueError as error:
        say_once("handed down", f"{environ.INTERNAL_CONFIG} cannot be read ({error}), it is ignored")
        return None


def handed_down_settings(env: Mapping[str, str]) -> Settings | None:
    """Return the settings of this rank's launcher, from its environment or else the file that is named there.

    None where there are none, or they cannot be read, which is said: those of the environment count then.
    """
    config = handed_down_config(env)
    file = env.get(environ.INTERNAL_SETTINGS)
    if config is None and not file:
        return None
    try:
        return settings_from_json(config.settings if config is not None else json.loads(read_text(file or "")))
    except (OSError, ValueError, TypeError, ConfigError) as error:
        say_once("settings", f"the launcher's settings cannot be read, those of RESILIENCE_* variables count: {error}")
        return None


_TRIES = 20
_PAUSE_S = 0.01


def remove_own(pages: Path, stem: Path) -> None:
    """Remove a rank's files, where no monitor can be started, with the last rank's all that is there; never raises."""
    with contextlib.suppress(OSError):
        for path in pages.glob(f"{stem.name}.*"):
            path.unlink()
        for _ in range(_TRIES):  # ranks that leave together meet at the locks
            remove_unwatched(pages, stem)
            if not pages.exists() or any(pages.glob("*.page")):
                return
            time.sleep(_PAUSE_S)


def remove_unwatched(pages: Path, stem: Path) -> None:
    """Remove the page directory of a rank that no monitor watches, if it is alone there; never raises.

    `stem`: the rank's own files, without suffix. With a second rank there, a monitor is about to come.
    """
    with contextlib.suppress(OSError, ImportError):
        if not (pages / job_config.FILE).exists():
            return
        with all_locks(pages) as mine:
            if mine and {page.with_suffix("") for page in pages.glob("*.page")} <= {stem}:
                # Moved away first: then nobody can make a lock in it meanwhile, which would keep it for ever.
                doomed = pages.rename(pages.with_name(f".{pages.name}.{os.getpid()}"))
                for path in doomed.iterdir():
                    path.unlink()
                doomed.rmdir()


_MAX_REASON = 500
_LOOKS_APART_S = 10.0  # at the memory of the device
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
        if internal and (handed_down := handed_down_config(env)) is not None:
            page_directory.make_again(self.pages, handed_down)  # removed since the launcher has made it
        if not identity.provisional and (other := process_of_rank(self.pages, self.attempt, identity.rank)):
            raise ResilienceError(f"rank {identity.rank} is process {other} already, whose environment this one has")
        self.config = join_job(self.pages, job, self._script, settings, env, explicit_run_dir, resumes=resumes)
        self.settings = settings_from_json(self.config.settings)
        console.use_json(self.settings.event_log == "json")
        if self.config.run_device is not None:
            same_device.remember(self.config.run_dir, self.config.run_device)
        self.run_dir = RunDirectory.create(self.config.run_dir, group_readable=self.settings.group_readable)
        same_device.remember(self.run_dir.path, self.config.run_device)
        self.may_resume = self.config.run_named or self.attempt > 0
        self.journal = rank_journal(self.run_dir, job, self.attempt, identity.rank)
        self._stem = self.pages / page_stem(self.attempt, identity.rank, self.pid)
        self._collectives = 0
        self._looked_at = float("-inf")
        self._uses_sdk = False
        self._trains = False
        # Ranks start together; the first one on the node starts the monitor, the others see that it is there.
        self._monitor = MonitorWatch(self.pages, delay_s=0.0 if identity.local_rank == 0 else 1.0)
        self._has_no_monitor = False
        self._helper = HelperThread(
            self._stem, periodic=self._tick, signalled=stopping.signalled, closed=self._descriptors_closed
        )
        self._catches_crashes = False
        self._dumps: int | None = self._register_dumps()
        # Last, because what can fail is behind us: whoever has a page is watched.
        self.page = self._create_page()
        self.page_since_ns = time.monotonic_ns()
        self.recorder = Recorder(self.page, self)
        self._exit = ExitTeller(self.page.words, self._stem)
        self.pages_key = _key_of(self.pages)

    def load_faults(self, env: Mapping[str, str]) -> None:
        """Arm the faults that the environment asks for, if they are this rank's; a bad one is said, not raised."""
        faults.on_change = lookup.forget
        faults.on_strike = self._fault_strikes
        faults.find_process = self._process_of
        faults.run_directory = self.run_dir.path
        try:
            faults.load(env.get(environ.FAULT, ""), self.identity.rank, self.attempt)
            size = self.identity.world_size
            for plan in faults.missing_ranks(env.get(environ.FAULT, ""), size) if self.identity.rank == 0 else ():
                console.say_once(
                    f"fault {plan}",
                    f"RESILIENCE_FAULT: {plan} strikes nobody: the ranks of this job are 0 to {size - 1}",
                )
        except ResilienceError as error:
            console.say_once("fault", f"no fault is injected, it is ignored: {error}")

    def _fault_strikes(self, given_by: str, step: int | None) -> None:
        """Leave a line of an injected fault, which is about to be as real as any other."""
        self.journal.emit(Event.FAULT_INJECTED, step=step, by=given_by, pid=self.pid)

    def _process_of(self, name: str) -> int | None:
        """Return the process that a fault is meant for: this job's monitor, or what has started its ranks."""
        if name == "monitor":
            return read_state(self.pages).get("pid")
        return self.config.launcher_pid or self.config.parent_pid or None

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
        callbacks.begin(self.run_dir.path, self.attempt)
        kernels.sample_by_default(self.settings.kernels_every)
        self._helper.start()
        preemption.listen(self._preemption_side())
        numerics.listen(_WatchedNumbers(self))
        resume_limits.record_in(self.journal.emit, lambda: self.identity.rank)
        call_at_shutdown(self.script_over)
        atexit.register(self._at_exit)
        # Children of multiprocessing end without atexit; their finalizers do run.
        multiprocessing.util.Finalize(self, self._at_exit, exitpriority=0)
        exceptions.chain_thread_hook(self.record_thread_exception)
        if environ.INTERNAL_ATTEMPT not in environ.environment():  # our launcher's workers record what ends them
            exceptions.chain_excepthook(self.record_exception)

    def keep_output(self, output: KeptOutput) -> None:
        """Watch for the reader of this rank's output to go away; said once on the node, journalled by each rank."""
        output.on_switch = self._output_goes_on
        with contextlib.suppress(OSError):
            output.look()
        self._helper.output = output

    def _output_goes_on(self, why: str) -> None:
        if self.pid != os.getpid():
            return  # a forked child has no journal: another thread may have held its lock
        if self.identity.local_rank == 0:
            console.say_once("output", why)
        self.journal.emit(Event.DEGRADED, what="output", why=why)

    def _preemption_side(self) -> PreemptionContext:
        env = environ.environment()
        coordination = self._coordination = stopping.Coordination(self.pages, self.attempt, env, self._find_monitor)
        return PreemptionContext(
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
            completed=lambda step: self.recorder.owner.completed_steps(at_end_of=step),
            stopping=stopping.StopTeller(self.run_dir.journal, self.attempt, env, lambda: self.identity.rank == 0),
        )

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

    def look_between_steps(self) -> None:
        """Publish the memory that it has on its device; never raises: an allocator of the user's may count nothing."""
        try:
            device_memory.publish(self.page.words)
        except Exception as error:  # noqa: BLE001 - see above
            self._looked_at = float("inf")
            if console.say_once("device memory", f"the memory on the device is not recorded: {error!r}"):
                self.journal.emit(Event.DEGRADED, what="device memory", why=repr(error))

    def declare(self) -> None:
        """Note that the user's code uses the SDK, so that a first beat is to be expected."""
        if not self._uses_sdk:
            self._uses_sdk = True
            if _counts_from_first_use():
                self.page.set_resumed(time.monotonic_ns())
            self.page.set_flag(at.FLAG_DECLARED)

    def optimizer_stepped(self) -> bool:
        """Count an optimizer step as progress, unless the script beats by itself: then return False, for good."""
        words = self.page.words
        if words[at.W_BEAT_SOURCE] == at.BEATS_USER:
            return False
        words[at.W_BEAT_SOURCE] = at.BEATS_OPTIMIZER
        self.recorder.pulse(None)
        return True

    def record_exception(self, error: BaseException) -> None:
        """Leave the exception that ends this rank for whoever explains it; never raises."""
        with contextlib.suppress(Exception):
            self.page.words[at.W_EXIT_STATE] = at.EXIT_ERROR
            step = self.recorder.owner.current_step()
            self.recorder.owner.note_end_by_exception()
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

    def ask_launcher(self, action: str, reason: str, advice: str = "") -> bool:
        """Ask the launcher to do that in the place of a restart; tell whether ours has started this rank."""
        from resilience_sdk.postmortem.facts import ENDING_SUFFIX, EndingRequest

        with contextlib.suppress(Exception):
            request = EndingRequest(action, redact_text(reason)[:_MAX_REASON], redact_text(advice)[:_MAX_REASON])
            write_whole(self._stem.with_suffix(ENDING_SUFFIX), to_text(request))
            return not self.config.foreign
        return False

    def make_witness_ring(self, facts: int) -> WitnessRing | None:
        """As that of every session."""
        me = self.identity
        with contextlib.suppress(OSError):  # a second loop of this process, or no room
            path = self._stem.with_suffix(witness_ring.SUFFIX)
            return WitnessRing(path, rank=me.rank, world_size=me.world_size, attempt=self.attempt, facts=facts)
        return None

    def find_witnesses(self) -> Witnesses | None:
        """As that of every session."""
        place = self.pages, self.run_dir.path
        return witness_ring.find(*place, self.identity.rank, self.attempt, self.config.job)

    def says_for_node(self, what: str) -> bool:
        """Tell whether this rank is the first that asks."""
        try:
            os.close(open_plain(self.pages / f"said-{self.attempt}-{what}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError as error:
            return not isinstance(error, FileExistsError)  # better twice than never
        return True

    def await_watch(self, patience_s: float) -> bool:
        """Wait until the monitor has this process in view, so that it learns how that ends; tell whether it has."""
        return await_look(self.pages, self.page_since_ns, patience_s, lambda: self._has_no_monitor)

    def keep_timeouts(self) -> None:
        """Have the monitor learn no deadline from this rank: what is set holds, else the defaults."""
        self.page.set_flag(at.FLAG_KEEPS_TIMEOUTS)

    def use_nvrx_words(self) -> None:
        """Have the lines of NVRx and torchrun, for which its users search, printed beside ours."""
        self.page.set_flag(at.FLAG_NVRX_WORDS)

    def leave_with(self, code: int) -> None:
        """Note the exit code that the script leaves with: what ends the process after it may change that."""
        self.page.words[at.W_EXIT_CODE] = code

    def script_over(self) -> None:
        """Note that the script has ended, by whatever: from here on the interpreter goes down. Main thread."""
        if self.pid == os.getpid() and not self.page.words[at.W_OVER_NS]:
            self.page.words[at.W_OVER_NS] = time.monotonic_ns()

    def orphan(self) -> None:
        """Give everything up in a forked child: it belongs to the parent."""
        self.recorder.orphan()
        if self._catches_crashes:
            faulthandler.disable()  # the crash of a DataLoader's worker is not the rank's

    def withdraw(self) -> None:
        """Take the page back when the start fails: one that never moves would look like a rank that hangs."""
        self.page.words[at.W_EXIT_STATE] = at.EXIT_CLEAN
        with contextlib.suppress(OSError):
            self.page.path.unlink()

    # -- parts

    def _keep_files(self) -> None:
        """Make the page directory and this rank's files in it again, should somebody have removed them."""
        if self.page.is_there() and page_directory.is_there(self.pages):
            return
        pid = self.config.launcher_pid
        if pid is not None and hostinfo.process_is_gone(pid, self.config.launcher_ticks):
            return  # it belongs to nobody any more
        try:
            if page_directory.make_again(self.pages, self.config):
                self._degraded(page_directory.LOST, page_directory.words_of_loss(self.pages))
            if not self.page.is_there():
                self._coordination.make_again()
                self.page.make_again()
                if self._dumps is not None:
                    self._stem.with_suffix(".stack").unlink(missing_ok=True)
                    self._dumps = self._register_dumps()
                self._helper.make_again()
        except OSError as error:
            self._degraded("no " + page_directory.LOST, page_directory.words_of_failure(self.pages, error))

    def _degraded(self, key: str, why: str) -> None:
        if console.say_once(key, why):
            self.journal.emit(Event.DEGRADED, what="pages", why=why)

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
        expects = self.settings.initial_heartbeat_timeout is not None and not _counts_from_first_use()
        page.set_flag(at.FLAG_DECLARED, expects)
        return page

    def _register_dumps(self) -> int | None:
        """Install the handlers that write stacks in C: of the main thread on the dump signal, hung or not; of all on
        a fatal signal (SIGSEGV, SIGBUS, SIGABRT, ...), unless the user has that already, or has it later.

        On the dump signal not those of other threads: reading the frames of a thread that runs ends the process now and
        then. A process that dies has nothing to lose, and the thread that ends it is often a library's in C (gloo, the
        watchdog of NCCL), which has no frames: the line that called the library stands in the main thread.
        """
        number = self.settings.dump_signal
        if not number or not hasattr(faulthandler, "register"):
            return None
        file = self._open_dumps(os.O_EXCL)
        faulthandler.register(number, file=file, all_threads=False, chain=False)
        if self._catches_crashes or not faulthandler.is_enabled():
            crash_dumps.enable(file, self._leave_crashes)
            self._catches_crashes = True
        return file

    def _leave_crashes(self) -> None:
        """Note that the program has switched faulthandler on itself: from now on it is the program's."""
        self._catches_crashes = False

    def _open_dumps(self, how: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how
        return linux.aside(open_plain(self._stem.with_suffix(".stack"), flags))

    def _descriptors_closed(self) -> None:
        """Do, on the helper thread, what is to be done when the program has closed descriptors that are ours."""
        if self._dumps is not None:
            # The old one is not closed: its number may be that of a file of the program's by now.
            self._dumps = self._open_dumps(os.O_APPEND)
            faulthandler.register(self.settings.dump_signal, file=self._dumps, all_threads=False, chain=False)
            if self._catches_crashes:
                crash_dumps.enable(self._dumps, self._leave_crashes)
        if console.say_once(
            "descriptors",
            "this program has closed descriptors of the SDK (os.closerange?): they were opened again, and training "
            "goes on; close only what the program has opened itself",
        ):
            self.journal.emit(Event.DEGRADED, what="descriptors", why="the program has closed them")

    def _tick(self) -> None:
        """Run about every 2 s on the helper thread."""
        with contextlib.suppress(OSError):
            self._exit.look()
        if self.page.words[at.W_EXIT_STATE] != at.EXIT_RUNNING:
            return
        self._keep_files()
        preemption.look()
        numerics.tell()
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
        self.recorder.ask()
        if device_memory.is_used() and time.monotonic() - self._looked_at >= _LOOKS_APART_S:
            self._looked_at = time.monotonic()
            self.recorder.look_at_next_beat()
        if not self._trains and optimizer_hook.was_one_made():
            self._trains = True
            self.page.set_flag(at.FLAG_TRAINS)
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
        callbacks.close(_LAST_ROUND_S)
        if error is not None:
            self.record_exception(error)
        else:
            self.page.set_flag(at.FLAG_GROUP_LEFT, gloo_teardown.has_group())
            self.page.words[at.W_EXIT_STATE] = at.EXIT_CLEAN
        self._helper.close(patience_s=_LAST_ROUND_S)
        gloo_teardown.settle_at_exit()
        # Not where somebody may start the ranks again: the next attempt goes on in the same run directory.
        is_clean = self.page.words[at.W_EXIT_STATE] == at.EXIT_CLEAN
        if self.config.foreign and (not self.config.parent_pid or (is_clean and self.identity.world_size == 1)):
            remove_unwatched(self.pages, self._stem)
        elif self.config.foreign and self._find_monitor() is False:
            remove_own(self.pages, self._stem)


def _counts_from_first_use() -> bool:
    """Tell whether the time to the first heartbeat counts from where the script uses the SDK, as it does in NVRx.

    Those who come over have chosen it for that; what a script does before may take long, and is no part of it.
    """
    return environ.INTERNAL_NVRX in environ.environment()


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


class _WatchedNumbers:
    """A session as the watch of its numbers asks it; see `numerics.NumericsRank`."""

    def __init__(self, session: WatchedSession) -> None:
        self._session = session
        self.journal = session.journal
        self.restarts = environ.restarts(environ.environment(), session.settings.max_restarts)
        self.skip_batches = session.settings.rollback_skip_batches

    @property
    def policy(self) -> str:
        return self._session.settings.numerics

    def rank(self) -> int:
        return self._session.identity.rank

    def place(self) -> AttemptPlace:
        mine = self._session
        return AttemptPlace(mine.config.job, mine.attempt, mine.identity.world_size, hostinfo.host_name())

    def step(self) -> tuple[int, bool]:
        lane = self._session.recorder.owner
        return lane.current_step(), lane.step_is_global

    def store(self) -> IncidentStore:
        return IncidentStore(self._session.run_dir.path, explain=meaning)

    def page(self) -> dict[int, dict[str, Any]]:
        reader = PageReader(self._session.page.path)
        try:
            snapshot = reader.snapshot()
        finally:
            reader.close()
        return {} if snapshot is None else {self.rank(): snapshot_to_json(snapshot)}
