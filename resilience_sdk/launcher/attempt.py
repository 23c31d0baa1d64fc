"""One attempt on this node: from the start of its ranks until the last of them is gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.attribution.exceptions import is_peer_symptom
from resilience_sdk.core.console import say
from resilience_sdk.core.events import Event
from resilience_sdk.core.journal import Journal
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.parse import signal_name
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.launcher.attempt_files import AttemptFiles
from resilience_sdk.launcher.ranks import RankProcesses
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.postmortem.facts import EndedBy, RankExit, RankTrace
from resilience_sdk.preemption.context import time_to_leave

if TYPE_CHECKING:
    from resilience_sdk.cluster.bus import NodeRelay
    from resilience_sdk.launcher.agent import Agent
    from resilience_sdk.launcher.sidecars import Housekeeping

JOINS = "another node wants to join: starting the ranks again with it"
_TICK_S = 1.0  # housekeeping only: a death or a signal ends the wait at once
_SETTLE_S = 0.5  # how long a rank that only lost its peers may be followed by the one that was lost


@attrs.frozen
class AttemptEnding:
    """How an attempt ended. `ending_ns`: monotonic, when the launcher began to end ranks, if it did."""

    by: EndedBy
    ending_ns: int | None = None
    first_ns: int | None = None  # monotonic, when the first rank failed


class Attempt:
    """Watches the ranks of one attempt and ends them. Main thread only."""

    def __init__(
        self,
        number: int,
        ranks: RankProcesses,
        *,
        settings: Settings,
        inbox: SignalInbox,
        files: AttemptFiles,
        journal: Journal,
        housekeeping: Housekeeping,
        agent: Agent,
        relay: NodeRelay,
    ) -> None:
        """Watch `ranks`. `housekeeping` is tended about once a second, the `agent` asked whether nodes want to join.

        The other nodes hear through the `relay` that a rank has failed of its own, as soon as that is seen.
        """
        self.number = number
        self.ranks = ranks
        self._settings = settings
        self._inbox = inbox
        self._files = files
        self._journal = journal
        self._housekeeping = housekeeping
        self._agent = agent
        self._relay = relay
        self._reported = 0
        self._ending_ns: int | None = None

    def run(self) -> AttemptEnding:
        """Watch until all ranks of this node are gone, and return how it came to that."""
        try:
            return self._watch()
        finally:
            self._note_exits()

    def traces(self) -> dict[int, RankTrace]:
        """Return what the ranks have left so far."""
        return self._files.traces(self.number, self.ranks.pids)

    def _watch(self) -> AttemptEnding:
        left_at: float | None = None
        while True:
            self.ranks.wait(_TICK_S)
            self._inbox.drain()
            self._note_exits()
            if self._inbox.request is not None:
                return self._leave(self._inbox.request)
            failed = [end for end in self.ranks.exits if end.exit_code not in (0, EXIT_PREEMPTED)]
            if failed:
                return self._fail(failed)
            if not self.ranks.running:
                return AttemptEnding(EndedBy.RANKS, self._ending_ns)
            if any(end.exit_code == EXIT_PREEMPTED for end in self.ranks.exits):
                # The others leave too, each after its own last save; one that never does is ended.
                left_at = left_at or time.monotonic()
                if time.monotonic() - left_at > self._settings.preempt_time:
                    return self._end("others left", EndedBy.RANKS)
            if self._agent.elastic and self._agent.nodes_waiting() > 0:
                say(JOINS)
                return self._end("membership", EndedBy.MEMBERSHIP)
            self._housekeeping.tend()

    def _fail(self, failed: list[RankExit]) -> AttemptEnding:
        """End the attempt after a rank failed, be it of its own or ended by the monitor for a hang."""
        first_ns = failed[0].at_ns
        if all(end.server_lost for end in failed):
            self._relay.note_fault()
            return attrs.evolve(self._end("the fork server is gone", EndedBy.SERVER), first_ns=first_ns)
        if self._files.hang_verdict(self.number) is not None:
            return attrs.evolve(self._end("hang", EndedBy.HANG), first_ns=first_ns)
        self._settle()
        if not self._only_symptoms(self.traces()):
            self._relay.note_fault()
        ending = self._end("rank failed", EndedBy.RANKS)
        # The monitor may have spoken in the moment between.
        if self._files.hang_verdict(self.number) is not None:
            ending = attrs.evolve(ending, by=EndedBy.HANG)
        return attrs.evolve(ending, first_ns=first_ns)

    def _settle(self) -> None:
        """While all who failed only lost their peers, give the lost one a moment to die by itself."""
        deadline = time.monotonic() + _SETTLE_S
        while self.ranks.running and time.monotonic() < deadline and self._only_symptoms(self.traces()):
            self.ranks.wait(min(0.05, deadline - time.monotonic()))
            self._inbox.drain()
            self._note_exits()

    def _only_symptoms(self, traces: Mapping[int, RankTrace]) -> bool:
        for trace in traces.values():  # an exception is written before its process has ended
            if trace.exception is not None and not is_peer_symptom(trace.exception):
                return False
        for end in self.ranks.exits:
            told = traces[end.rank].exception is not None
            if end.exit_code not in (0, EXIT_PREEMPTED, -signal.SIGABRT) and not told:
                return False
        return True

    def _leave(self, request: int) -> AttemptEnding:
        """Forward a request to leave once, wait for the ranks as long as it allows, and end them."""
        self._begin_ending("interrupt" if self._inbox.interrupted else "preemption")
        before, name = self._inbox.interrupts, signal_name(request)
        if self._inbox.interrupted:
            say(f"{name}: asking the ranks to stop (Ctrl-C again ends them now)")
            forward: int = signal.SIGINT if request == signal.SIGINT else signal.SIGTERM
            grace = self._settings.term_grace
        else:
            grace = time_to_leave(self._settings.preempt_time)
            say(f"{name}: asking the ranks to save and leave within {grace:g} s")
            self._journal.emit(Event.PREEMPT_NOTICE, source=name, time_left_s=grace)
            forward = request
        running = list(self.ranks.running)
        self._journal.emit(Event.SIGNAL_SENT, signal=signal_name(forward), ranks=running, why="leave")
        self.ranks.end(grace, first=forward, hurry=lambda: self._inbox.interrupts > before)
        return AttemptEnding(EndedBy.INTERRUPT if self._inbox.interrupted else EndedBy.PREEMPTION, self._ending_ns)

    def _end(self, reason: str, by: EndedBy) -> AttemptEnding:
        """End the ranks that still run, on the launcher's own behalf."""
        self._begin_ending(reason)
        if self.ranks.running:
            running = list(self.ranks.running)
            self._journal.emit(Event.SIGNAL_SENT, signal="SIGTERM", ranks=running, why=reason)
            self.ranks.end(self._settings.term_grace, hurry=lambda: self._inbox.interrupts > 0)
        else:
            self.ranks.kill()
        return AttemptEnding(by, self._ending_ns)

    def _begin_ending(self, reason: str) -> None:
        self._files.write_ending(self.number, reason)
        self._ending_ns = time.monotonic_ns()

    def _note_exits(self) -> None:
        for end in self.ranks.exits[self._reported :]:
            self._journal.emit(
                Event.RANK_EXIT,
                rank=end.rank,
                local_rank=end.local_rank,
                pid=end.pid,
                order=end.order,
                **end.to_event(),
                ended_by_launcher=end.ended_by_us,
                **self._files.last_step(self.number, end.rank, end.pid, is_finished=end.exit_code == 0),
            )
        self._reported = len(self.ranks.exits)
