"""One job on this node: attempt after attempt, until the decision says that it is over."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.console import say, say_once
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.agent import Agent
from resilience_sdk.launcher.attempt import JOINS, Attempt, Ending
from resilience_sdk.launcher.attempt_files import AttemptFiles, RankTrace, exception_from_torch, written_ns
from resilience_sdk.launcher.attempt_journal import AttemptJournal
from resilience_sdk.launcher.closing import fault_line, read_exit_code, restart_line
from resilience_sdk.launcher.decision import AttemptEnd, Decision, EndedBy, decide
from resilience_sdk.launcher.evidence import Facts
from resilience_sdk.launcher.meeting import first_line
from resilience_sdk.launcher.node_ends import NodeEnd, read_end
from resilience_sdk.launcher.probes import await_resource
from resilience_sdk.launcher.relay import NodeRelay
from resilience_sdk.launcher.reporter import Finding, Reporter
from resilience_sdk.launcher.signals import LeaveRequested, SignalInbox
from resilience_sdk.launcher.witness import Witness, look_safely
from resilience_sdk.monitor.raised import may_be_of_thread
from resilience_sdk.outcome import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HARDWARE,
    EXIT_INTERRUPTED,
    EXIT_STOP,
    Verdict,
)
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.settings import Settings

_CODES = {
    Verdict.FINISHED: EXIT_FINISHED,
    Verdict.PREEMPTED: EXIT_PREEMPTED,
    Verdict.HARDWARE: EXIT_HARDWARE,
    Verdict.STOP: EXIT_STOP,
    Verdict.INTERRUPTED: EXIT_INTERRUPTED,
}

_WORD_S = 0.5  # for the word of a node that has come again
_NO_FAULT = (EXIT_FINISHED, EXIT_PREEMPTED, EXIT_INTERRUPTED)


@attrs.frozen
class JobEnd:
    """How the job ended on this node."""

    decision: Decision
    attempts: int
    what: str | None
    incidents: tuple[str, ...]
    checkpoint: int | None


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
        chores: Callable[[], None],
        error_files: Callable[[], dict[int, str]],
        log_files: Callable[[], dict[int, tuple[str, ...]]],
        nodes_are_ready: Callable[[], bool | Decision] = lambda: True,
    ) -> None:
        """Run attempts with `agent`; `chores` keeps lease and monitor alive; `error_files` are torch's.

        `log_files`: what each local rank writes into, where that is a file of its own. `nodes_are_ready` is asked
        whenever nodes have met: False to meet again, a decision that ends the job here.
        """
        self._agent = agent
        self._key = key
        self._settings = settings
        self._run_dir = run_dir
        self._journal = journal
        self._files = files
        self._inbox = inbox
        self._chores = chores
        self._error_files = error_files
        self._log_files = log_files
        self._nodes_are_ready = nodes_are_ready
        self._relay = NodeRelay(files.directory, journal)
        self._reporter = Reporter(run_dir, journal, self._relay, term_grace_s=settings.term_grace)
        self._history: list[AttemptEnd] = []
        self._incidents: list[str] = []
        self._number = 0
        self._told = AttemptJournal(run_dir.journal, key, 0)
        self._started_s = time.monotonic()
        self._last_fault: str | None = None

    def run(self) -> JobEnd:
        """Run attempts until one ends the job."""
        while True:
            finding = self._attempt()
            if finding is None:
                continue
            if isinstance(finding, Decision):
                if not finding.elsewhere:  # else whoever took it tells it
                    self._journal.emit(Event.DECISION, **finding.to_event())
                return self._ended(finding)
            if finding.incident is not None:
                self._incidents.append(finding.incident)
            self._history.append(
                attrs.evolve(finding.end, spare_nodes=self._agent.spare_nodes, holds_store=self._agent.holds_store)
            )
            decision = self._decide(finding)
            if finding.end.ended_by in (EndedBy.RANKS, EndedBy.HANG) and decision.exit_code not in _NO_FAULT:
                self._last_fault = fault_line(finding.headline, finding.end.cause)
            if not decision.restarts:
                if finding.traceback is not None:
                    say(finding.traceback)
                return self._ended(decision)
            say(fault_line(finding.headline, finding.end.cause))
            say(restart_line(decision, finding.end.checkpoint_after))
            self._inbox.sleep(decision.delay_s)
            if decision.waits_for is not None:
                limit_s = self._settings.wait_limit
                await_resource(decision.waits_for, self._run_dir.path, limit_s, self._sleep, self._journal)

    def _attempt(self) -> Finding | Decision | None:
        """Run one attempt. None: it ended for no fault and does not count; a decision: it never began."""
        try:
            with self._inbox.raising():
                self._number = self._agent.meet(self._number)
            ready = self._nodes_are_ready()
        except LeaveRequested:
            return self._left_before_start(newest_checkpoint(self._run_dir))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - elastic's many kinds: timeouts, refusals, closed by others
            return self._never_met(error)
        if ready is not True:
            return ready or None
        witness = Witness.begin(self._run_dir)
        try:
            attempt = self._start()
            if isinstance(attempt, str):
                return Decision(Verdict.GIVE_UP, EXIT_FAILED, f"the ranks could not be started: {attempt}", 0)
            return self._run(attempt, witness)
        finally:
            witness.close()

    def _run(self, attempt: Attempt, witness: Witness) -> Finding | None:
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
        self._files.write_attempt(
            number, ranks, agent.world_size, node=agent.node, nodes=agent.nodes, node_name=agent.node_name
        )
        self._relay.start(agent.store, number, agent.node, agent.nodes)
        self._journal.emit(
            Event.ATTEMPT_START, ranks=ranks, world_size=agent.world_size, node=agent.node, nodes=agent.nodes
        )
        self._told = AttemptJournal(self._run_dir.journal, self._key, number)
        self._started_s = time.monotonic()
        self._chores()  # now: while the monitor comes up nobody would see a rank die
        try:
            processes = agent.start(self._inbox)
        except (RuntimeError, OSError) as error:
            return str(error)
        return Attempt(
            number,
            processes,
            settings=self._settings,
            inbox=self._inbox,
            files=self._files,
            journal=self._journal,
            chores=self._chores,
            nodes_waiting=agent.nodes_waiting if agent.elastic else None,
            note_fault=self._relay.note_fault,
        )

    def _conclude_safely(self, attempt: Attempt, ending: Ending, witness: Witness) -> Finding:
        """Conclude, or go on with the exit codes alone: our own fault must not cost the user a restart."""
        try:
            return self._conclude(attempt, ending, witness)
        except Exception as error:  # noqa: BLE001 - see above
            why = f"{type(error).__name__}: {error}"
            say_once("conclude", f"the end of this attempt could not be examined ({why})")
            self._journal.emit(Event.DEGRADED, what="attribution", why=why, trace=traceback.format_exc())
            codes = attempt.ranks.exit_codes
            after = newest_checkpoint(self._run_dir)
            end = AttemptEnd(
                self._number, ending.by, codes, checkpoint_before=witness.checkpoint, checkpoint_after=after
            )
            return Finding(end, f"ranks ended with exit codes {codes}")

    def _conclude(self, attempt: Attempt, ending: Ending, witness: Witness) -> Finding:
        codes, exits = attempt.ranks.exit_codes, tuple(attempt.ranks.exits)
        traces = self._with_torch_errors(attempt.traces(), attempt)
        hung, lasted_s = ending.by is EndedBy.HANG, time.monotonic() - self._started_s
        seen = look_safely(
            lambda: witness.look(exits, traces, self._log_files(), hung=hung),
            lambda why: self._journal.emit(Event.DEGRADED, what="logs", why=why),
        )
        facts = Facts(
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
            unkillable=attempt.ranks.unkillable,
            cgroup_oom=seen.cgroup_oom,
            told=seen.told,
            node_told=seen.node_told,
            job_told=seen.job_told,
            checkpoint_before=witness.checkpoint,
            checkpoint_after=newest_checkpoint(self._run_dir),
            lasted_s=None if self._files.directory is None else lasted_s,
            began_at=time.time() - lasted_s,
            events=self._told.events,
            stop_agreed=not set(codes.values()) - {0, EXIT_PREEMPTED} and self._stop_agreed(),
        )
        return self._reporter.conclude(facts, self._files.hang_verdict(self._number), ending.first_ns)

    def _with_torch_errors(self, traces: dict[int, RankTrace], attempt: Attempt) -> dict[int, RankTrace]:
        """Fill in what torch's own error files say where the SDK was not at work in a rank, and what threads raised."""
        files = self._error_files()
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

    def _decide(self, finding: Finding) -> Decision:
        decision = decide(self._history, self._settings.max_restarts)
        end = finding.end
        self._journal.emit(
            Event.DECISION, attempt=end.attempt, cause=end.cause, confidence=end.confidence, **decision.to_event()
        )
        if decision.restarts and finding.incident is not None:
            self._reporter.note_restart(finding.incident)
        return decision

    def _sleep(self, seconds: float) -> bool:
        """Sleep at most so long; tell whether nobody wants us to leave."""
        self._chores()
        self._inbox.sleep(seconds)
        return self._inbox.request is None

    def _ended(self, decision: Decision) -> JobEnd:
        return JobEnd(
            decision, self._number, self._last_fault, tuple(self._incidents), newest_checkpoint(self._run_dir)
        )

    def _left_before_start(self, before: int | None) -> Finding:
        by = EndedBy.INTERRUPT if self._inbox.interrupted else EndedBy.PREEMPTION
        end = AttemptEnd(self._number, by, checkpoint_before=before, checkpoint_after=before)
        return Finding(end, "the job was asked to leave before its ranks started")

    def _never_met(self, error: Exception) -> Decision:
        """End the job on this node because there was no rendezvous: the others may have ended it already."""
        code = read_exit_code(self._run_dir.outcome, self._key)
        if code is not None:
            verdict = next((v for v, c in _CODES.items() if c == code), Verdict.GIVE_UP)
            return Decision(verdict, code, "another node ended the job", 0, elsewhere=True)
        return Decision(Verdict.GIVE_UP, EXIT_FAILED, f"the nodes did not meet ({first_line(error)})", 0)


def _fault_of(told: tuple[int, Mapping[str, Any]]) -> str:
    """Return what a node says of a fault, from its number and its words; nothing where there was none."""
    end = read_end(*told)
    return "" if end.joins else end.headline
