"""`resilience run`: the launcher's program. It prepares the job, runs it, and says how it ended."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from resilience_sdk._version import __version__
from resilience_sdk.core import console, environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.early_signals import job_has_begun, job_is_over, leaving_at_once
from resilience_sdk.core.job_config import JobConfig, agree
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.lease import Lease, current_holder
from resilience_sdk.core.redaction import redact_argv
from resilience_sdk.core.run_directory import RunDirectory, choose_run_dir, tell_finished
from resilience_sdk.core.run_directory_keeper import RunDirectoryKeeper
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.launcher.last_lines import JobOutcome, closing_lines, leaving_lines, may_wrap
from resilience_sdk.launcher.restart_policy import Decision, to_leave
from resilience_sdk.launcher.sidecars import Beside, Housekeeping, LeaseRenewal, PageKeeper, summary_lines, write_report
from resilience_sdk.launcher.signals import HABITS, LeaveRequested, SignalInbox, below_init, leave
from resilience_sdk.monitor.spawn import read_state
from resilience_sdk.postmortem.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE, JobVerdict
from resilience_sdk.postmortem.outcome import Outcome, write_outcome
from resilience_sdk.recorder.page_directory import job_page_directory
from resilience_sdk.system import same_device
from resilience_sdk.system.hostinfo import boot_id, host_name, process_is_gone, process_start_ticks
from resilience_sdk.system.installation import refusal, versions

if TYPE_CHECKING:
    from resilience_sdk.launcher.agent import Agent
    from resilience_sdk.launcher.attempt import AttemptFiles
    from resilience_sdk.launcher.job import Job, JobEnd
    from resilience_sdk.launcher.options import Options
    from resilience_sdk.launcher.preflight import Look

_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"
_NO_NUMPY = "Failed to initialize NumPy"  # said at each import of torch; the launcher does without


def load_torch() -> None:
    """Import torch so that its C++ part says errors only: of a lost store it prints whole stacks."""
    own = environ.environment()
    is_open = _CPP_LEVEL not in own
    if is_open:
        own[_CPP_LEVEL] = "ERROR"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NO_NUMPY)
            import torch  # noqa: F401 - it reads the variable once
    finally:
        if is_open:
            del own[_CPP_LEVEL]  # what the ranks say is the user's


_MONITOR_END_S = 1.0
_FLAG_PAUSE_S = 1.0
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOENT, errno.ETIMEDOUT})
_SET_ASIDE_S = 5.0  # how long a node waits for another one that is setting the old run aside


def main(argv: Sequence[str]) -> int:
    """Run a job as the arguments say and return the exit code (the contract's: 0, 1, 2, 75, 76, 77, 130)."""
    if (why := refusal()) is not None:
        say(why)
        return EXIT_USAGE
    return below_init(lambda: _main_or_leave(argv))


def _main_or_leave(argv: Sequence[str]) -> int:
    with leaving_at_once():  # loading torch takes seconds
        return job_is_over(_main(argv))


def _main(argv: Sequence[str]) -> int:
    load_torch()
    from resilience_sdk.launcher import env, options

    # Torch logs each failure in several lines; the user's traceback and our verdict must stand out.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    env.prepare_launcher()
    is_quick = False  # about the end of this process: its interpreter takes seconds to be taken down
    try:
        chosen = options.parse_options(argv)
        env.tell_signals(chosen)
        if chosen.nvrx_section is not None:
            env.provide_nvrx(chosen.nvrx_section)
        console.bind(node=host_name())
        console.use_json(chosen.settings.event_log == "json")
        names = [*chosen.elastic_signals.split(","), *HABITS]
        with SignalInbox(names, notices=chosen.settings.preempt_signals) as inbox:
            job_has_begun()
            is_quick = not chosen.local
            try:
                with inbox.raising(ends_process=True):
                    code = _run_chosen(chosen, inbox)
            except LeaveRequested:
                inbox.settle()
                end = _left_early(inbox)
                say(f"{end.reason} (exit code {end.exit_code})")
                code = end.exit_code
            is_quick = is_quick or inbox.request is not None
    except (ConfigError, RunDirectoryError) as error:
        say(f"{error}")
        code = EXIT_USAGE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if is_quick:
        leave(code)
    return code


def _left_early(inbox: SignalInbox) -> Decision:
    return to_leave(inbox.name, inbox.stage, interrupted=inbox.interrupted)


def _run_chosen(options: Options, inbox: SignalInbox) -> int:
    _refuse_unknown_sinks(options.settings)
    run_dir, named = _open_run_dir(options)
    if named and run_dir.is_finished() and not options.fresh:
        say(f"{run_dir.path} is finished: training is complete, nothing to do (--fresh starts over)")
        tell_finished()  # a script that waits for its own flag file starts us again and again
        return 0
    return _run_in(options, run_dir, named, inbox)


def _refuse_unknown_sinks(settings: Settings) -> None:
    if settings.sinks:
        from resilience_sdk.telemetry.sinks import find_unknown

        if unknown := find_unknown(settings):
            raise ConfigError(unknown[0])


def _open_run_dir(options: Options) -> tuple[RunDirectory, bool]:
    """Choose and make the run directory; with `--fresh` set an existing one aside, unless a job uses it."""
    settings = options.settings
    path, named = choose_run_dir(options.script.target, environ.environment(), settings.run_dir)
    if not named and not options.one_node:
        raise ConfigError(
            f"--nnodes {options.elastic.nnodes}: several nodes need one run directory that all of them see; name it "
            f"with --run-dir or {environ.RUN_DIR}"
        )
    if options.fresh and path.exists():
        _start_over(options, RunDirectory.create(path, group_readable=settings.group_readable))
    return RunDirectory.create(path, group_readable=settings.group_readable), named


def _start_over(options: Options, old: RunDirectory) -> None:
    """Set what is in `old` aside, once per job: the first of its nodes does it, the others find it done."""
    key = _job_key(options)
    deadline = time.monotonic() + _SET_ASIDE_S
    while not options.one_node and (holder := current_holder(old)) is not None:
        if holder.job == key:
            return
        if holder.job != f"fresh {key}" or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if not options.one_node and old.is_unused():
        return
    lease = Lease.acquire(old, f"fresh {key}", alone=True)
    try:
        aside = old.set_aside()
    except RunDirectoryError:
        lease.release()
        raise
    if aside is not None:
        # It went with the directory, in which nothing runs any more.
        with contextlib.suppress(OSError):
            RunDirectory(aside).lease.unlink()
        say(f"starting over: what was in {old.path} is now in {aside}")


def _job_key(options: Options) -> str:
    from resilience_sdk.launcher import env

    return env.job_key(environ.environment(), options.rendezvous_id, options.meeting_point)


def _run_in(options: Options, run_dir: RunDirectory, named: bool, inbox: SignalInbox) -> int:
    key = _job_key(options)
    lease = Lease.acquire(run_dir, key, alone=options.one_node)
    console.keep_unwritten(run_dir.unwritten_output(host_name()))
    journal = Journal(run_dir.journal, writer="launcher", host=host_name(), boot_id=boot_id(), job=key)
    try:
        with LeaseRenewal(lease):
            return _Launch(options, run_dir, named, inbox, key, lease, journal).run()
    finally:
        journal.close()
        lease.release()


@attrs.define
class _Launch:
    """Everything that one job of this launcher holds, and the order in which it is put up and taken down."""

    options: Options
    run_dir: RunDirectory
    named: bool
    inbox: SignalInbox
    key: str
    lease: Lease
    journal: Journal
    started_at: float = attrs.field(factory=time.time)
    _told: Outcome | None = None
    """The end of the job, where this node is the one that wrote it."""
    _has_report: bool = False
    _summary: list[str] = attrs.field(factory=list)
    _job: Job | None = None

    def run(self) -> int:
        self.inbox.last_words = self._write_last_words
        with contextlib.ExitStack() as held:
            try:
                job_end = self._run_job(held)
            except LeaveRequested:
                self.inbox.settle()
                job_end = self._left_early()
            finally:
                self.inbox.only_note()  # what is taken down is not left half done
        return self._finish(job_end)

    def _left_early(self) -> JobEnd:
        """Conclude a job that was asked to leave while none of its ranks ran."""
        from resilience_sdk.checkpoint.newest import newest_checkpoint
        from resilience_sdk.launcher.job import JobEnd

        decision = _left_early(self.inbox)
        if self._job is not None:
            end = self._job.so_far(decision)
        else:
            end = JobEnd(decision, attempts=0, what=None, incidents=(), checkpoint=newest_checkpoint(self.run_dir))
        self.journal.emit(Event.DECISION, **decision.to_event())
        self._write_outcome(end, first_node=self.options.one_node)
        return end

    def _write_last_words(self) -> None:
        """Write the outcome of a job whose main thread does not come back. Any thread."""
        with contextlib.suppress(Exception):
            self._left_early()

    def _run_job(self, held: contextlib.ExitStack) -> JobEnd:
        """Prepare the job, run it, and say how it ended. Until `Job.run` a signal raises.

        `held` takes down what was put up, in the reverse order.
        """
        from resilience_sdk.launcher import env
        from resilience_sdk.launcher.agent import Agent
        from resilience_sdk.launcher.attempt import AttemptFiles
        from resilience_sdk.launcher.forkserver import WorkerStarter
        from resilience_sdk.launcher.job import Job
        from resilience_sdk.launcher.options import launch_config, least_nodes
        from resilience_sdk.launcher.preflight import Look
        from resilience_sdk.launcher.preflight_nodes import NodesPreflight

        options = self.options
        config_of_job = self._config()
        files = AttemptFiles(self._pages(config_of_job), config_of_job)
        beside = Beside(self.run_dir.path, self.key, options.settings, files.directory, self.journal)
        held.callback(lambda: beside.close(is_hurried=self.inbox.request is not None))  # last: all is in the journal
        held.callback(self._look_back)
        held.callback(_take_down, files)
        keeper = PageKeeper(files, self.journal)
        held.callback(keeper.close)
        place = RunDirectoryKeeper(self.run_dir, self.journal, group_readable=options.settings.group_readable)
        held.callback(place.close)
        starter = WorkerStarter(options.script, start_method=options.start_method)
        held.callback(starter.close)
        config = launch_config(options, os.devnull)  # the logs have a place of their own, which may be full
        variables = env.job_variables(
            job=self.key,
            run_dir=self.run_dir.path,
            named=self.named,
            pages=files.directory,
            settings_file=files.write_settings(options.settings.to_json()),
            config=config_of_job,
        )
        starter.prepare({**environ.environment(), **variables})
        self._announce(files)
        look = self._preflight(int(config.nproc_per_node), beside) if options.preflight else Look()
        if look.refused is not None and not look.tells_others:
            self.journal.emit(Event.DECISION, **look.refused.decision.to_event())
            if not look.refused.decision.others_go_on:
                self._write_outcome(look.refused, first_node=True)
            return look.refused
        logs = env.RankLogs(lambda: launch_config(options, str(self.run_dir.logs)).logs_specs, variables, self.journal)
        agent = Agent(
            config,
            options.script,
            logs,
            starter,
            local=options.local,
            preflight=options.preflight,
            journal=self.journal,
            outcome=JobOutcome(self.run_dir.outcome, self.key),
        )
        housekeeping = Housekeeping(self.journal, files.directory, beside)
        job = self._job = Job(
            agent,
            key=self.key,
            settings=options.settings,
            run_dir=self.run_dir,
            journal=self.journal,
            files=files,
            inbox=self.inbox,
            housekeeping=housekeeping,
            logs=logs,
            place=place,
            preflight=NodesPreflight(agent, look, least_nodes(options.elastic), self.inbox, self.journal),
        )
        end: JobEnd | None = None
        self.inbox.only_note()
        try:
            end = job.run()
            if look.refused is not None and end.decision.verdict is JobVerdict.GIVE_UP:
                end = look.refused  # the others never came to hear of it
            if end.decision.verdict is JobVerdict.FINISHED and not end.decision.elsewhere:
                end = self._finished_everywhere(agent, job, end)
            if end.decision.verdict is JobVerdict.FINISHED and agent.node == 0 and not end.decision.elsewhere:
                end = self._mark_finished(end)
            if not end.decision.others_go_on and not end.decision.elsewhere:
                self._write_outcome(end, first_node=agent.node == 0)
            return end
        finally:
            # Other nodes learn from the closed rendezvous that the job is over, and read the outcome.
            agent.leave(closed=end is not None and end.decision.ends_the_job)

    def _preflight(self, local_ranks: int, beside: Beside) -> Look:
        """Look at this node."""
        from resilience_sdk.launcher.preflight import preflight

        beside.keep_alive()  # the sinks are told of a job that is refused, too
        return preflight(self.options, self.run_dir, local_ranks, self.inbox, self.journal)

    def _config(self) -> JobConfig:
        """Return what all processes of the job on this node go by."""
        pid = os.getpid()
        ticks = process_start_ticks(pid)
        settings = self.options.settings
        return JobConfig(
            job=self.key,
            run_dir=str(self.run_dir.path),
            run_named=self.named,
            settings=settings.to_json(),
            on_hang=settings.on_hang or "restart",
            script=self.options.script.target,
            launcher_pid=pid,
            launcher_ticks=ticks,
            creator_pid=pid,
            creator_ticks=ticks or 0,
            parent_pid=pid,
            parent_ticks=ticks or 0,
            run_device=same_device.remember(self.run_dir.path),
        )

    def _pages(self, config: JobConfig) -> Path | None:
        from resilience_sdk.launcher import env

        own = environ.environment()
        if environ.is_disabled(own):
            return None
        try:
            # Two launchers may share a job key (two runs in one allocation); each has its own pages.
            pages = job_page_directory(f"{self.key} {env.launcher_key()}", own)
            agree(pages, config)
        except OSError as error:
            words = "the ranks run unwatched: hangs and slow ranks are not seen; checkpoints are written all the same"
            say_once("pages", f"{words}: {error}")
            self.journal.emit(Event.DEGRADED, what="pages", why=str(error))
            return None
        return pages

    def _announce(self, files: AttemptFiles) -> None:
        files.write_launcher(job=self.key, run_dir=str(self.run_dir.path), started_at=self.started_at)
        self.journal.emit(
            Event.RUN_START,
            argv=redact_argv(self.options.argv),
            run_dir=str(self.run_dir.path),
            run_named=self.named,
            pid=os.getpid(),
            unheld_s=self.lease.unheld_s,
            python=sys.version.split()[0],
            versions={"resilience_sdk": __version__, **versions()},
            settings=self.options.settings.to_json(),
        )
        say(f"run directory {self.run_dir.path}")
        with contextlib.suppress(OSError):
            # What stands there is from now on this job's: nodes read one another's end in it.
            self.run_dir.outcome.unlink()

    def _write_outcome(self, end: JobEnd, *, first_node: bool) -> None:
        """Write how the job ended: the first node if it finished, else whichever node ended it."""
        finished = end.decision.verdict is JobVerdict.FINISHED
        if not first_node and (finished or JobOutcome(self.run_dir.outcome, self.key).exit_code() is not None):
            return
        if finished:
            self.journal.emit(Event.FINISHED, attempts=end.attempts)
        self._told = self._outcome(end)
        write_outcome(self.run_dir.outcome, self._told)

    def _finished_everywhere(self, agent: Agent, job: Job, end: JobEnd) -> JobEnd:
        """Wait for the word of the other nodes that their ranks have finished, too."""
        if agent.nodes == 1:
            return end
        # Asked to leave while its ranks finished: those of the others may have finished by now as well.
        if self.inbox.request is not None and agent.all_nodes_finished(limit_s=_ASKED_S):
            return end
        told = "when the ranks of this node had finished, and those of another were not known to have"
        self.inbox.stage = told
        try:
            with self.inbox.raising():
                if agent.all_nodes_finished():
                    return end
            return attrs.evolve(end, decision=job.ended_elsewhere() or _UNSURE)
        except LeaveRequested:
            self.inbox.settle()  # else it counts as swallowed, and is raised again
            return attrs.evolve(end, decision=to_leave(self.inbox.name, told, interrupted=self.inbox.interrupted))

    def _mark_finished(self, end: JobEnd) -> JobEnd:
        """Set the flag, waiting for room as long as for a restart; without it the job has not finished."""
        limit_s = self.options.settings.wait_limit
        until = time.monotonic() + limit_s
        while True:
            try:
                self.run_dir.mark_finished()
                return end
            except RunDirectoryError as error:
                passes = getattr(error.__context__, "errno", None) in _PASSING
                if not passes or self.inbox.request is not None or time.monotonic() > until:
                    reason = f"all ranks exited with 0, but {error}"
                    return attrs.evolve(end, decision=Decision(JobVerdict.GIVE_UP, reason))
                say_once("flag", f"{error}; trying again for up to {limit_s:.0f} s")
            self.inbox.sleep(_FLAG_PAUSE_S)

    def _look_back(self) -> None:
        """Sum up a job that this node has concluded, and write its page, where there was anything to see."""
        outcome = self._told
        if outcome is None or (self.inbox.request and not outcome.attempts):
            return

        def is_hurried() -> bool:
            return outcome.verdict is JobVerdict.PREEMPTED or self.inbox.request is not None

        if outcome.attempts and not environ.is_disabled(environ.environment()):
            self._summary = summary_lines(self.run_dir.path, is_hurried=is_hurried)
        if self.options.settings.report:
            self._has_report = write_report(self.run_dir.path, self.run_dir.report, self.journal, is_hurried=is_hurried)

    def _finish(self, end: JobEnd) -> int:
        outcome = self._outcome(end)
        page = self.run_dir.report if self._has_report else None
        stays = not end.decision.others_go_on
        console.begin_line()  # what a rank printed last may have no end
        for line in closing_lines(outcome, self._summary, page) if stays else leaving_lines(outcome):
            say(line, wrap=may_wrap(line))
        return end.decision.exit_code

    def _outcome(self, end: JobEnd) -> Outcome:
        from resilience_sdk.launcher import options

        finished = end.decision.verdict is JobVerdict.FINISHED
        return Outcome(
            verdict=end.decision.verdict,
            exit_code=end.decision.exit_code,
            reason=end.decision.reason,
            job=self.key,
            run_dir=str(self.run_dir.path),
            node=host_name(),
            started_at=self.started_at,
            ended_at=time.time(),
            attempts=end.attempts,
            what=end.what,
            incidents=end.incidents,
            checkpoint=end.checkpoint,
            not_taken=end.not_taken,
            resume=None if finished else options.resume_command(self.options, str(self.run_dir.path)),
            stood=end.stood,
            free=end.free,
            advice=end.decision.advice,
        )


_ASKED_S = 3.0  # for the word of the other nodes, where this launcher was asked to leave
_UNSURE = Decision(
    JobVerdict.GIVE_UP, "the ranks of this node finished; no word came from another node that its ranks did, too"
)


def _take_down(files: AttemptFiles) -> None:
    """Tell the monitor that the job is over, wait a moment for it to go, and remove the page directory."""
    if files.directory is None:
        return
    files.write_over()
    deadline = time.monotonic() + _MONITOR_END_S
    while (state := read_state(files.directory)) and time.monotonic() < deadline:
        if process_is_gone(state["pid"], state["start_ticks"]):
            break
        time.sleep(0.01)
    files.remove_all()
