"""The facts of an ended attempt: its exits, what the ranks left, who ended it, and what was concluded from that. Pure.

Whoever launched the ranks collects them; `crash`, `preemption` and `report` read them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.attribution.exceptions import is_peer_symptom
from resilience_sdk.attribution.exits import Classification, Resource, exit_fields
from resilience_sdk.cluster.membership import Peer
from resilience_sdk.core.journal import CURVES, Event, journal_sizes, read_journal
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.recorder.page_reader import RankSnapshot

if TYPE_CHECKING:
    from resilience_sdk.attribution.diagnosis import LogFindings


LEAVE_SIGNALS = frozenset(
    number
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    if (number := getattr(signal, name, None)) is not None
)
"""Signals by which schedulers and people ask a process to leave; without a handler it dies of them."""


class EndedBy(str, Enum):
    """Who ended an attempt."""

    RANKS = "ranks"  # they exited, or one of them died
    HANG = "hang"  # the monitor ended it after a confirmed hang
    SERVER = "server"  # the fork server was killed, and the ranks with it
    PREEMPTION = "preemption"  # the launcher was told to leave (SIGTERM and kin)
    INTERRUPT = "interrupt"  # Ctrl-C
    MEMBERSHIP = "membership"  # a node joined: no fault, and not counted


@attrs.frozen
class KnownError:
    """What makes the uncaught exceptions of two attempts the same error: equal values.

    `message` has what differs between two runs of one bug taken out (see `attribution.exceptions`);
    `step` is None unless steps are global.
    """

    type: str
    message: str
    user_frame: str | None
    step: int | None = None


ENDING_SUFFIX = ".ending.json"
"""Of the file beside a rank's page that has its `EndingRequest`."""
STOP, EXCLUDE_NODE, UNSAVED = "stop", "exclude_node", "unsaved"


@attrs.frozen
class EndingRequest:
    """What a rank wants done when its attempt has ended by a failure, in the place of a restart."""

    action: str = attrs.field(validator=attrs.validators.in_((STOP, EXCLUDE_NODE, UNSAVED)))
    """`stop`: the job ends. `exclude_node`: it goes on without the node of the rank. `unsaved`: it ends without having
    finished, since its last state could not be saved; another attempt would train all of it again."""
    reason: str
    advice: str = ""
    """What to do before the job is started again, where that is known."""


@attrs.frozen
class AttemptEnd:
    """One ended attempt, as far as the decision needs it. Exit codes are by rank; a signal is negative."""

    attempt: int
    ended_by: EndedBy
    exit_codes: Mapping[int, int] = attrs.field(factory=dict)
    error: KnownError | None = None  # of the culprit, never of a victim
    category: str = "unknown"
    cause: str = "unknown"
    action: str = "restart"
    confidence: float = 0.0
    completed_a_step: bool | None = None  # None: the ranks gave no sign of progress that could tell
    checkpoint_before: int | None = None  # newest valid step when the attempt began
    checkpoint_after: int | None = None  # and when it ended
    stop_agreed: bool = False
    straggler: str | None = None  # who was so slow that the job asked itself to stop
    straggler_is_here: bool = True  # on this node, as the others decide by themselves
    spare_nodes: int = 0  # how many the job can do without
    holds_store: bool = False  # this node has the store of the rendezvous, without which no other can go on
    stood: str | None = None  # what stood still when somebody ended the attempt, in words
    free: bool = False  # a hang, ended at this place for the first time, or no rank's fault: not of the budget
    final: str | None = None  # a hang that another attempt would come to as well: why the job ends
    leaving: str | None = None  # who asked the job to leave, and what came of it, in one sentence
    all_done: bool = False  # every rank said that its training is over
    aborted: Sequence[int] = ()  # ranks that died by SIGABRT when their scripts had left with those codes
    resource: Resource | None = None  # what has to work again before another attempt makes sense
    requested: EndingRequest | None = None  # what a rank of this node wants done in the place of a restart
    reached: int | None = None  # how many steps the rank with the fewest had completed, None where none tells
    lines: Sequence[str] = ()  # the program's own lines at which the culprits were, where that is known

    @property
    def made_checkpoint(self) -> bool:
        """Tell whether a new checkpoint was completed during this attempt."""
        return self.checkpoint_after is not None and (
            self.checkpoint_before is None or self.checkpoint_after > self.checkpoint_before
        )


@attrs.frozen
class RankExit:
    """The end of one rank process. `exit_code` is negative for a signal, `at_ns` is CLOCK_MONOTONIC."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None  # None: nobody knows, its parent was another launcher
    order: int  # 0 is the first of this node to go
    at_ns: int
    ended_by_us: bool  # after we had signalled it
    aborted_at_exit: bool = False
    """Its script had left with `exit_code`; then SIGABRT ended the process, while its interpreter went down."""
    ended_late: bool = False
    """It had finished its training, and its process was ended for `exit_timeout`."""
    server_lost: bool = False
    """It was killed with the fork server, by the kernel: nobody touched the rank."""

    def died_asked(self, signals: Collection[int] = LEAVE_SIGNALS) -> bool:
        """Tell whether it died of one of `signals`, which ask to leave, and none of ours was sent to it before."""
        code = self.exit_code
        return code is not None and -code in signals and not self.ended_by_us

    def to_event(self) -> dict[str, Any]:
        """Return how it ended as the event `rank_exit` has it."""
        if self.aborted_at_exit:
            return {**exit_fields(-signal.SIGABRT), "script_exit_code": self.exit_code}
        if self.ended_late:
            return {**exit_fields(self.exit_code), "script_exit_code": self.exit_code}
        return {**exit_fields(self.exit_code), "script_exit_code": None}


def asked_to_leave(
    exits: Iterable[RankExit], traces: Mapping[int, RankTrace], signals: Collection[int] = LEAVE_SIGNALS
) -> tuple[RankExit, ...]:
    """Return the ranks that died of a signal that asks to leave, where no rank has failed of its own.

    Whoever signals one rank means the job, be it a scheduler or a person: without that rank no other can go on. Ranks
    that only lost their peers are no failure of their own.
    """
    asked = []
    for end in exits:
        exception = traces[end.rank].exception if end.rank in traces else None
        if end.died_asked(signals) and exception is None:
            asked.append(end)
        elif (
            end.exit_code in (0, EXIT_PREEMPTED)
            or end.ended_by_us
            or (end.exit_code == -signal.SIGABRT and exception is None)
        ):
            continue
        elif exception is None or not is_peer_symptom(exception):
            return ()
    return tuple(asked)


@attrs.frozen
class RankTrace:
    """What one rank process left: its last page, its exception, and the text of its last stack dump."""

    rank: int
    pid: int
    snapshot: RankSnapshot | None
    exception: Mapping[str, Any] | None
    exception_ns: int | None  # monotonic nanoseconds of this host at which the exception was written
    stacks: str | None
    thread_exception: Mapping[str, Any] | None = None  # of a thread other than the main one, which went on
    request: EndingRequest | None = None
    stacks_ns: int | None = None
    """When the last of `stacks` was written, on this host's monotonic clock; None where that is not known."""


@attrs.frozen
class ServerEnd:
    """The end of the fork server: a process that nobody but its launcher is to end."""

    pid: int
    code: int | None
    """As `Popen.returncode`; None where it cannot be told."""


class AttemptJournal:
    """Reads what follows its making, each part of it once.

    An attempt's events are told by their place in the files, not by their time: clocks of hosts differ, and a requeued
    job has the key and the attempt numbers of the one before. And the journal of a long run is large.
    """

    def __init__(self, directory: Path, job: str | None, attempt: int, *, began_at: float | None = None) -> None:
        """Note how far the files in `directory` have come; events are those of `attempt` of `job` (None: of any).

        `began_at` (Unix seconds): read what is there already, too, as far as it is not older.
        """
        self._directory = directory
        self._job = job
        self._attempt = attempt
        self._began_at = 0.0 if began_at is None else began_at
        self._read_to: Mapping[str, int] = journal_sizes(directory) if began_at is None else {}
        self._events: list[Mapping[str, Any]] = []

    def events(self) -> Sequence[Mapping[str, Any]]:
        """Return the attempt's events up to now, by time. Never raises."""
        new = read_journal(self._directory, since=self._read_to, without=CURVES)
        self._read_to = {**self._read_to, **new.read_to}
        ours = [
            event
            for event in new.events
            if event.get("attempt") == self._attempt
            and self._job in (None, event.get("job"))
            and event["t"] >= self._began_at
        ]
        if ours:
            self._events = sorted([*self._events, *ours], key=lambda event: float(event["t"]))
        return self._events


def unix_s(monotonic_ns: int) -> float:
    """Return a time of this host's monotonic clock in Unix seconds."""
    return time.time() - (time.monotonic_ns() - monotonic_ns) / 1e9


def written_ns(path: Path) -> int | None:
    """Return when a file was written, on this host's monotonic clock."""
    try:
        age_ns = time.time_ns() - path.stat().st_mtime_ns
    except OSError:
        return None
    return time.monotonic_ns() - max(0, age_ns)


@attrs.frozen
class NodeLook:
    """What a look at this node has found after the attempt, which words of a program had started."""

    found: tuple[Classification, ...]
    """What leaves it out."""
    seen: str
    """What was looked at, in words."""


@attrs.frozen
class AttemptFacts:
    """Everything that is known when an attempt is over. `ending_ns`: when we began to end it, monotonic."""

    attempt: int
    node: str
    exits: Sequence[RankExit]
    traces: Mapping[int, RankTrace]
    ended_by: EndedBy
    ending_ns: int | None = None
    unkillable: Sequence[int] = ()
    cgroup_oom: bool | None = None
    lost_server: ServerEnd | None = None  # the fork server was ended, and its ranks with it
    server_told: Sequence[Classification] = ()  # what the kernel says of it
    checkpoint_before: int | None = None
    checkpoint_after: int | None = None
    stop_agreed: bool = False
    node_number: int = 0
    nodes: int = 1
    peers: Sequence[Peer] = ()  # all nodes by number, where there are several
    store_host: str = ""  # where the store of the rendezvous is
    lasted_s: float | None = None  # from the start of the ranks; None: they cannot give signs of progress
    began_at: float = 0.0  # Unix seconds of this host: a requeued job has the attempt numbers of the one before
    journal: AttemptJournal | None = None  # what all of its processes have told, and still may tell
    told: Mapping[int, Sequence[Classification]] = attrs.field(factory=dict)  # by rank: its log, the kernel
    node_told: Sequence[Classification] = ()  # what the kernel says of no process
    job_told: LogFindings | None = None  # the log that all ranks write into
    look: NodeLook | None = None  # None where nobody has looked
    own_port: int | None = None  # of the ranks' store, where our launcher has picked it
    asked: Collection[int] = ()  # ranks that died of a signal by which somebody asked them to leave
    terminal_closed: bool = False  # the launcher's, by which the user interrupted the job

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """What all processes of the attempt have journalled up to now, by time."""
        return () if self.journal is None else self.journal.events()

    @property
    def pages(self) -> dict[int, RankSnapshot]:
        """The last page of each rank that has left one."""
        return {rank: trace.snapshot for rank, trace in self.traces.items() if trace.snapshot is not None}

    def told_of(self, name: Event) -> list[Mapping[str, Any]]:
        """Return the events of that name."""
        return [event for event in self.events if event["event"] == name.value]

    @property
    def ended_at(self) -> dict[int, float]:
        """When each rank ended (Unix seconds), those of other nodes by the journal."""
        told = {e["rank"]: float(e["t"]) for e in self.told_of(Event.RANK_EXIT) if isinstance(e.get("rank"), int)}
        return told | {end.rank: unix_s(end.at_ns) for end in self.exits}
