"""One job on this node.

Attempt after attempt, until the decision says that it is over; between them what failed is tried until it works.
"""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.attribution.exits import NAME, PORT, STORAGE, Resource
from resilience_sdk.checkpoint.newest import NewestFinder, NewestState
from resilience_sdk.cluster.bus import NodeRelay
from resilience_sdk.core import console, environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.port_holder import words_of_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.run_directory_keeper import RunDirectoryKeeper
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.incidents import count_words
from resilience_sdk.launcher.agent import Agent
from resilience_sdk.launcher.attempt import (
    JOINS,
    Attempt,
    AttemptEnding,
    AttemptFiles,
    exception_from_torch,
)
from resilience_sdk.launcher.env import RankLogs
from resilience_sdk.launcher.last_lines import JobOutcome, fault_line, restart_line
from resilience_sdk.launcher.node_look import look_where_blamed
from resilience_sdk.launcher.rendezvous import first_line, holder_of_taken_port, within
from resilience_sdk.launcher.restart_policy import Decision, decide, ends_free, to_leave
from resilience_sdk.launcher.sidecars import Housekeeping
from resilience_sdk.launcher.signals import BEFORE_START, LeaveRequested, SignalInbox
from resilience_sdk.monitor.pending_exceptions import may_be_of_thread
from resilience_sdk.postmortem.collect import NodeEnd, Witness, look_safely, read_end
from resilience_sdk.postmortem.exit_codes import JobVerdict, verdict_of
from resilience_sdk.postmortem.facts import (
    AttemptEnd,
    AttemptFacts,
    AttemptJournal,
    EndedBy,
    RankTrace,
    written_ns,
)
from resilience_sdk.postmortem.preemption import lost_words
from resilience_sdk.postmortem.report import AttemptFinding, Reporter
from resilience_sdk.system.storage_probe import PROBE_TIMEOUT_S, write_scratch

if TYPE_CHECKING:
    from resilience_sdk.launcher.preflight_nodes import NodesPreflight

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


def try_resource(resource: Resource, run_dir: Path) -> str | None:
    """Return why the resource still fails, None when it works or nothing can be tried."""
    tries: dict[str, Callable[[], None]] = {
        STORAGE: lambda: write_scratch(_existing(Path(resource.name)) if resource.name else run_dir),
        NAME: lambda: _resolve(resource.name),
        PORT: lambda: _bind(resource.name),
    }
    try:
        within(PROBE_TIMEOUT_S, tries[resource.kind])
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return f"{why}; {words_of_holder(int(resource.name))}" if resource.kind == PORT and resource.name else why
    return None


def await_resource(
    resource: Resource, run_dir: Path, limit_s: float, sleep: Callable[[float], bool], journal: Journal
) -> bool:
    """Try the resource again and again, less and less often, until it works; return whether it does.

    After `limit_s` seconds, or when `sleep` returns False because somebody wants the launcher to leave, that is
    left to the next attempt.
    """
    began, pause, told = time.monotonic(), _FIRST_PAUSE_S, ""
    while True:
        why = try_resource(resource, run_dir)
        left = limit_s - (time.monotonic() - began)
        if why is None or left <= 0:
            break
        if why != told:
            say(f"waiting for {resource}: {why}")
            told = why
        if not sleep(min(pause, left)):
            break
        pause = min(_LONGEST_PAUSE_S, pause * 2)
    waited_s = time.monotonic() - began
    journal.emit(Event.HEALTH, what=str(resource), ok=why is None, why=why, waited_s=round(waited_s, 3))
    if why is not None and left <= 0:
        say(f"no longer waiting for {resource} after {waited_s:.0f} s ({why}): trying all the same")
    return why is None


def _existing(path: Path) -> Path:
    """Return the nearest directory of a path that is there: what could not be made is missing."""
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))


def _resolve(host: str | None) -> None:
    if host is not None:
        socket.getaddrinfo(host, None)


def _bind(port: str | None) -> None:
    if port is not None and 0 < int(port) < 1 << 16:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(port)))


_SCHEDULER_NODE = "SLURMD_NODENAME"  # how Slurm calls this node, which may not be its host's name
_AGAIN = "before its ranks started again; what was saved is kept"
_WORD_S = 0.5  # for the word of a node that has come again
_FAULTS = (EndedBy.RANKS, EndedBy.HANG, EndedBy.SERVER)
_NO_FAULT = (JobVerdict.FINISHED, JobVerdict.PREEMPTED, JobVerdict.INTERRUPTED)


@attrs.frozen
class JobEnd:
    """How the job ended on this node."""

    decision: Decision
    attempts: int
    what: str | None
    incidents: tuple[str, ...]
    checkpoint: int | None
    not_taken: tuple[str, ...] = ()
    stood: str | None = None
    free: bool = False


class Job:
    """Runs the attempts. Main thread only."""

    def __init__(
        self,
        agent: Agent,
        *,
        key: str,
        settings: Settings,
        run_dir: RunDirectory,
        journal: Journal,
        files: AttemptFiles,
        inbox: SignalInbox,
        housekeeping: Housekeeping,
        logs: RankLogs,
        place: RunDirectoryKeeper | None = None,
        preflight: NodesPreflight | None = None,
    ) -> None:
        """Run attempts with `agent`; `housekeeping` keeps the monitor alive.

        `logs` knows torch's error files, and what each local rank writes into; `preflight` is held whenever nodes have
        met.
        """
        self._agent = agent
        self._key = key
        self._settings = settings
        self._run_dir = run_dir
        self._journal = journal
        self._files = files
        self._inbox = inbox
        self._housekeeping = housekeeping
        self._logs = logs
        self._place = place
        self._preflight = preflight
        self._outcome = JobOutcome(run_dir.outcome, key)
        self._relay = NodeRelay(files.directory, journal)
        self._reporter = Reporter(run_dir, journal, self._relay, term_grace_s=settings.term_grace)
        housekeeping.write_kept = self._reporter.write_kept
        self._history: list[AttemptEnd] = []
        self._incidents: list[str] = []
        self._number = 0
        self._told = AttemptJournal(run_dir.journal, key, 0)
        self._started_s = time.monotonic()
        self._last_fault: str | None = None
        self._finder = NewestFinder(run_dir)
        self._newest = NewestState(None)
        self._has_run = False

    def run(self) -> JobEnd:
        """Run attempts until one ends the job."""
        while True:
            finding = self._attempt()
            if finding is None:
                if self._has_run:
                    self._inbox.stage = _AGAIN
                continue
            if isinstance(finding, Decision):
                if not finding.elsewhere:  # else whoever took it tells it
                    self._journal.emit(Event.DECISION, **finding.to_event())
                return self._ended(finding)
            self._inbox.stage = _between_attempts(self._newest.step, is_after_fault=True)
            self._incidents += filter(None, (finding.before, finding.incident))
            self._history.append(
                attrs.evolve(
                    finding.end,
                    free=finding.end.free or self._is_missing(finding.end.resource),
                    spare_nodes=self._agent.spare_nodes,
                    holds_store=self._agent.holds_store,
                )
            )
            decision = self._decide(finding)
            if finding.end.ended_by in _FAULTS and decision.verdict not in _NO_FAULT:
                self._last_fault = fault_line(finding.headline, finding.end.cause)
            if not decision.restarts:
                if finding.traceback is not None:
                    say(finding.traceback)
                return self._ended(decision)
            say(fault_line(finding.headline, finding.end.cause))
            say(restart_line(decision, finding.end.checkpoint_after, self._newest.not_taken))
            self._inbox.sleep(decision.delay_s)
            if decision.waits_for is not None:
                self._await(decision.waits_for)

    def _is_missing(self, resource: Resource | None) -> bool:
        """Tell whether a resource that ranks failed for does not work for this process, either."""
        if resource is None:
            return False
        with contextlib.suppress(LeaveRequested), self._inbox.raising():  # `_attempt` sees it, too
            return try_resource(resource, self._run_dir.path) is not None
        return False

    def _await(self, resource: Resource) -> None:
        """Wait for what the ranks failed for. An attempt without it would fail alike, so that one counts."""
        limit_s, came = self._settings.wait_limit, True
        with contextlib.suppress(LeaveRequested), self._inbox.raising():  # `_attempt` sees it, too
            came = await_resource(resource, self._run_dir.path, limit_s, self._sleep, self._journal)
        if not came:
            self._history[-1] = attrs.evolve(self._history[-1], free=False)

    def _attempt(self) -> AttemptFinding | Decision | None:
        """Run one attempt. None: it ended for no fault and does not count; a decision: it never began."""
        why = None if self._place is None else self._place.wait(self._sleep, self._settings.wait_limit)
        if why is not None and self._inbox.request is None:
            return Decision(JobVerdict.GIVE_UP, f"the run directory cannot be used: {why}")
        try:
            with self._inbox.raising():
                self._number = self._agent.meet(self._number)
                ready = True if self._preflight is None else self._preflight.hold()
        except LeaveRequested:
            return self._left_before_start()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - elastic's many kinds: timeouts, refusals, closed by others
            return self._never_met(error)
        if ready is not True:
            return ready or None
        witness = Witness.begin(self._look_for_newest().step)
        try:
            try:
                with self._inbox.raising():
                    attempt = self._start()
            except LeaveRequested:
                return self._left_before_start(is_announced=True)
            if isinstance(attempt, str):
                return Decision(JobVerdict.GIVE_UP, f"the ranks could not be started: {attempt}")
            return self._run(attempt, witness)
        finally:
            witness.close()

    def _run(self, attempt: Attempt, witness: Witness) -> AttemptFinding | None:
        ending = attempt.run()
        finding = None
        if ending.by is not EndedBy.MEMBERSHIP:
            finding = self._conclude_safely(attempt, ending, witness)
            if finding.end.ended_by is EndedBy.MEMBERSHIP:  # other launchers saw it first, ours only lost connections
                say(finding.headline)
                finding = None
        else:
            self._relay.tell_end(NodeEnd(self._agent.node, headline=JOINS, joins=True).to_json())
            self._say_why_they_come_again()
        self._relay.stop()
        attempt.ranks.close()
        self._files.remove_attempt(self._number)
        self._journal.emit(
            Event.ATTEMPT_END,
            ended_by=ending.by.value,
            exit_codes={str(rank): code for rank, code in attempt.ranks.exit_codes.items()},
        )
        self._number += 1
        self._has_run = True
        return finding

    def _say_why_they_come_again(self) -> None:
        """Repeat what a node told whose ranks failed, and which is therefore here again before ours noticed."""
        ends = self._relay.wait_for_ends(lambda ends, *_: any(map(_fault_of, ends.items())), _WORD_S)
        for headline in filter(None, map(_fault_of, ends.items())):
            say(headline)

    def _start(self) -> Attempt | str:
        """Start the ranks; return why that was not possible."""
        agent, number = self._agent, self._number
        ranks = sorted(agent.ranks.values())
        self._journal.attempt = number
        console.bind(attempt=number)
        self._files.write_attempt(
            number, ranks, agent.world_size, node=agent.node, nodes=agent.nodes, node_name=agent.node_name
        )
        self._relay.start(agent.store, number, agent.node, agent.nodes)
        self._journal.emit(
            Event.ATTEMPT_START,
            ranks=ranks,
            world_size=agent.world_size,
            node=agent.node,
            nodes=agent.nodes,
            node_name=agent.node_name,
            scheduler_node=environ.environment().get(_SCHEDULER_NODE),
            rendezvous_s=round(agent.rendezvous_s, 3),
        )
        self._told = AttemptJournal(self._run_dir.journal, self._key, number)
        self._started_s = time.monotonic()
        self._housekeeping.tend()  # now: while the monitor comes up nobody would see a rank die
        try:
            processes = agent.start(self._inbox, self._files)
        except (RuntimeError, OSError) as error:
            return str(error)
        return Attempt(
            number,
            processes,
            settings=self._settings,
            inbox=self._inbox,
            files=self._files,
            journal=self._journal,
            housekeeping=self._housekeeping,
            agent=agent,
            relay=self._relay,
        )

    def _conclude_safely(self, attempt: Attempt, ending: AttemptEnding, witness: Witness) -> AttemptFinding:
        """Conclude, or go on with the exit codes alone: our own fault must not cost the user a restart."""
        try:
            return self._conclude(attempt, ending, witness)
        except Exception as error:  # noqa: BLE001 - see above
            why = f"{type(error).__name__}: {error}"
            say_once("conclude", f"the end of this attempt could not be examined ({why})")
            self._journal.emit(Event.DEGRADED, what="attribution", why=why, trace=traceback.format_exc())
            codes = attempt.ranks.exit_codes
            after = self._look_for_newest().step
            end = AttemptEnd(
                self._number, ending.by, codes, checkpoint_before=witness.checkpoint, checkpoint_after=after
            )
            return AttemptFinding(end, f"ranks ended with exit codes {codes}")

    def _conclude(self, attempt: Attempt, ending: AttemptEnding, witness: Witness) -> AttemptFinding:
        codes, exits = attempt.ranks.exit_codes, tuple(attempt.ranks.exits)
        traces = self._with_torch_errors(attempt.traces(), attempt)
        hung, lasted_s = ending.by is EndedBy.HANG, time.monotonic() - self._started_s
        server = attempt.ranks.server_end if ending.by is EndedBy.SERVER else None
        seen = look_safely(
            lambda: witness.look(
                exits, traces, self._logs.log_files, hung=hung, server=None if server is None else server.pid
            ),
            lambda why: self._journal.emit(Event.DEGRADED, what="logs", why=why),
        )
        for rank, stacks in seen.stacks.items():
            traces[rank] = attrs.evolve(traces[rank], stacks=stacks)
        facts = AttemptFacts(
            attempt=self._number,
            node=self._agent.node_name,
            node_number=self._agent.node,
            nodes=self._agent.nodes,
            peers=self._agent.peers,
            store_host=self._agent.store_host,
            exits=exits,
            traces=traces,
            ended_by=ending.by,
            ending_ns=ending.ending_ns,
            asked=ending.asked,
            terminal_closed=ending.terminal_closed,
            own_port=self._agent.own_port,
            unkillable=attempt.ranks.unkillable,
            cgroup_oom=seen.cgroup_oom,
            lost_server=server,
            server_told=seen.server_told,
            told=seen.told,
            node_told=seen.node_told,
            job_told=seen.job_told,
            checkpoint_before=witness.checkpoint,
            checkpoint_after=self._look_for_newest().step,
            lasted_s=None if self._files.directory is None else lasted_s,
            began_at=time.time() - lasted_s,
            journal=self._told,
            stop_agreed=not set(codes.values()) - {0, EXIT_PREEMPTED} and self._stop_agreed(),
        )
        if ending.by is EndedBy.RANKS:
            facts = look_where_blamed(facts, self._settings, len(exits), self._journal)
        return self._reporter.conclude(facts, self._files.hang_verdict(self._number), ending.first_ns)

    def _with_torch_errors(self, traces: dict[int, RankTrace], attempt: Attempt) -> dict[int, RankTrace]:
        """Fill in what torch's own error files say where the SDK was not at work in a rank, and what threads raised."""
        files = self._logs.error_files
        for end in attempt.ranks.exits:
            trace, path = traces[end.rank], files.get(end.local_rank)
            if trace.exception is not None or end.exit_code == 0:
                continue
            if path and (found := exception_from_torch(path)):
                traces[end.rank] = attrs.evolve(trace, exception=found, exception_ns=written_ns(Path(path)))
            elif may_be_of_thread(end.exit_code):  # it raised long before the rank ended, so it tells no time
                traces[end.rank] = attrs.evolve(trace, exception=trace.thread_exception)
        return traces

    def _stop_agreed(self) -> bool:
        """Tell whether a stop was journalled since this attempt began."""
        return any(event["event"] == Event.STOP_AGREED.value for event in self._told.events())

    def _decide(self, finding: AttemptFinding) -> Decision:
        decision = decide(self._history, self._settings.max_restarts)
        end = finding.end
        self._journal.emit(
            Event.DECISION, attempt=end.attempt, cause=end.cause, confidence=end.confidence, **decision.to_event()
        )
        if decision.restarts and finding.incident is not None:
            self._reporter.note_restart(finding.incident)
        return decision

    def _look_for_newest(self) -> NewestState:
        self._newest = self._finder.find()
        return self._newest

    def _sleep(self, seconds: float) -> bool:
        """Sleep at most so long; tell whether nobody wants the launcher to leave."""
        self._housekeeping.tend()
        self._inbox.sleep(seconds)
        return self._inbox.request is None

    def _ended(self, decision: Decision) -> JobEnd:
        self._reporter.write_kept()
        self._look_for_newest()
        return self.so_far(decision)

    def so_far(self, decision: Decision) -> JobEnd:
        """Return the end of the job as it stands, by what is known without another look at any file."""
        last = self._history[-1] if self._history else None
        return JobEnd(
            decision,
            self._number,
            self._last_fault,
            tuple(self._incidents),
            self._newest.step,
            self._newest.not_taken,
            stood=None if last is None else last.stood,
            free=last is not None and ends_free(self._history),
        )

    def ended_elsewhere(self) -> Decision | None:
        """Return how another node has ended the job, which this one was cut off from or left behind; None if none did.

        Known by what that node has written into the run directory, which both see: what this node sees of its own
        ranks, or of a store that it does not reach, says nothing about the job.
        """
        code = self._outcome.exit_code()
        if code is None:
            return None
        went_on = "the other nodes went on without this one, and all their ranks exited with 0"
        reason = went_on if code == 0 else "another node ended the job"
        return Decision(verdict_of(code), reason, exit_code=code, elsewhere=True)

    def _left_before_start(self, *, is_announced: bool = False) -> AttemptFinding | Decision:
        """Conclude an attempt whose ranks were not started, as somebody wants the launcher to leave."""
        self._inbox.settle()
        if not is_announced and (known := self.ended_elsewhere()) is not None:
            return known
        if is_announced:
            self._relay.stop()
            self._files.remove_attempt(self._number)
            self._journal.emit(Event.ATTEMPT_END, ended_by=EndedBy.PREEMPTION.value, exit_codes={})
        before, inbox = self._look_for_newest().step, self._inbox
        is_after_fault = bool(self._history)
        told = _between_attempts(before, is_after_fault=is_after_fault) if self._has_run else BEFORE_START
        by = EndedBy.INTERRUPT if inbox.interrupted else EndedBy.PREEMPTION
        reason = to_leave(inbox.name, told, interrupted=inbox.interrupted).reason
        end = AttemptEnd(self._number, by, checkpoint_before=before, checkpoint_after=before, leaving=reason)
        return AttemptFinding(end, reason)

    def _never_met(self, error: Exception) -> Decision:
        """End the job on this node because there was no rendezvous: the others may have ended it already."""
        if (known := self.ended_elsewhere()) is not None:
            return known
        why = first_line(error)
        return Decision(JobVerdict.GIVE_UP, f"the nodes did not meet ({why}){holder_of_taken_port(why)}")


def _fault_of(told: tuple[int, Mapping[str, Any]]) -> str:
    """Return what a node says of a fault, from its number and its words; nothing where there was none."""
    end = read_end(*told)
    return "" if end.joins else end.headline


def _between_attempts(newest: int | None, *, is_after_fault: bool) -> str:
    """Say what leaving loses once ranks have run; `newest`: after how many steps the checkpoint for a resume is."""
    kept = lost_words(None, None) if newest is None else f"the newest checkpoint is after {count_words(newest)}"
    return f"before its ranks started again{' after a fault' if is_after_fault else ''}; {kept}"
