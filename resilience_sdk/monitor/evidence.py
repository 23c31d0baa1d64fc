"""Evidence from all ranks of a node at once.

Stacks, flight records, what the kernel says, and the close look at one moment.

Neither needs the rank's training thread. The first is answered by the rank's helper thread, which needs the
GIL. The second by a signal handler in C, even while an extension holds the GIL; it reads frames that a running
thread may change under it, so it is for ranks whose helper is silent: there nothing runs.
Nothing here waits: `evidence` asks all ranks first and then collects.

All requests go out before the first answer is awaited, so the whole takes as long as the slowest rank, and
at most the grace that the settings give. A rank that does not answer is evidence too, and is said.

The helper threads are asked first, which is safe whatever a rank is doing. Only who is silent then, because
something holds its GIL, and does not move gets the dump signal: its frames cannot change while a signal handler reads
them, and no call of its is interrupted that might not stand it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import attrs

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.plain_file import open_plain
from resilience_sdk.hang.evidence import (
    FlightRecord,
    ThreadStack,
    busy_with,
    frames_of,
    is_in_collective,
    main_frames,
    parse_faulthandler,
    parse_flight_record,
)
from resilience_sdk.hang.timers import CollectivePosition, RankState
from resilience_sdk.incidents.record import Evidence
from resilience_sdk.monitor.ranks import Target, WatchedRank, is_ours
from resilience_sdk.system import procfs
from resilience_sdk.system.hostinfo import process_state
from resilience_sdk.system.procfs import has_signal, status_fields

_ASK_FLIGHT = b"f"
_MOST_STACK_BYTES = 1 << 20
_MOST_FLIGHT_BYTES = 32 << 20
# The first words of a dump with all threads, of one thread, and of CPython 3.14's.
_HEADERS = (b"Thread 0x", b"Stack (most recent")
_STOPPED = {"T": "it is stopped", "t": "it is stopped by a debugger", "Z": "it is dead", "X": "it is dead"}


class StackRequest:
    """Asks one rank for the stack of its main thread."""

    def __init__(self, target: Target, dump_signal: int) -> None:
        """Prepare; nothing is sent yet. `dump_signal` 0 means that dumps are switched off."""
        self.target = target
        self._signal = dump_signal
        self._path = target.file(".stack")
        self._start = 0
        self._last_size = 0
        self._open_threads: tuple[int, ...] = ()

    def send(self) -> str | None:
        """Send the dump signal; return why not, in words, when the rank cannot answer.

        The default action of the signal is death: it goes only to a process that is ours and whose handler
        is there.
        """
        if not self._signal:
            return "stack dumps are switched off"
        status = status_fields(self.target.pid)
        if not status or not is_ours(self.target):
            return "the process is gone"
        if (state := status.get("State", "")[:1]) in _STOPPED:
            return f"{_STOPPED[state]} (state {state}) and cannot answer"
        if status.get("TracerPid", "0") != "0":
            return "a debugger is attached, and would stop it at the dump signal"
        if not has_signal(status.get("SigCgt"), self._signal):
            return "it has no handler for the dump signal"
        size = _size(self._path)
        if size is None:
            return "its stack file is missing"
        self._start = self._last_size = size
        self._open_threads = self._threads_that_let_it_through()
        try:
            return None if self.target.send(self._signal) else "the process is gone"
        except OSError as error:
            return f"the dump signal cannot be sent: {error.strerror}"

    def poll(self) -> str | None:
        """Return the dump once it is complete, else None. Call it every few milliseconds.

        A dump is written in many small pieces, so growth alone does not end it. The kernel knows: while the
        handler runs, the signal is blocked in the thread that runs it.
        """
        size = _size(self._path)
        if size is None or size == self._start or size != self._last_size:
            self._last_size = size or self._last_size
            return None
        return None if self._handler_runs() else self.partial()

    def partial(self) -> str | None:
        """Return what is there of a dump; None when nothing is, or nothing that looks like one."""
        data = _read(self._path, self._start, _MOST_STACK_BYTES)
        if data is None or not any(header in data for header in _HEADERS):
            return None
        return data.decode("utf-8", "replace")

    def _threads_that_let_it_through(self) -> tuple[int, ...]:
        pid = self.target.pid
        return tuple(tid for tid in _thread_ids(pid) if not self._blocked_in(tid))

    def _handler_runs(self) -> bool:
        return any(self._blocked_in(tid) for tid in self._open_threads)

    def _blocked_in(self, tid: int) -> bool:
        return has_signal(status_fields(self.target.pid, tid).get("SigBlk"), self._signal)


class FlightRequest:
    """Asks one rank's helper thread for torch's flight record and the stacks of all threads."""

    def __init__(self, target: Target) -> None:
        """Prepare; nothing is sent yet."""
        self.target = target
        self._answer = target.file(".fr.json")
        self._stacks = target.file(".threads")
        self._before: tuple[int, int, int] | None = None
        self._stacks_before: tuple[int, int, int] | None = None

    def send(self) -> str | None:
        """Write the request into the rank's FIFO; return why not, in words, when nobody can answer."""
        state = status_fields(self.target.pid).get("State", "Z")[:1]
        if state in _STOPPED:
            return f"{_STOPPED[state]} (state {state}) and cannot answer"
        self._before = _identity(self._answer)
        self._stacks_before = _identity(self._stacks)
        try:
            fd = os.open(self.target.file(".fifo"), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:  # ENXIO: nobody reads it
            return f"its helper thread is not there ({error.strerror})"
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                return "its request pipe is no pipe"
            os.write(fd, _ASK_FLIGHT)
        except OSError as error:  # a full pipe: it has not read for a long time
            return f"its helper thread does not read requests ({error.strerror})"
        finally:
            os.close(fd)
        return None

    def poll(self) -> str | None:
        """Return the record's JSON text once a newer one than before is there, else None.

        The rank renames it into place, so a file that is there is complete.
        """
        if _identity(self._answer) in (None, self._before):
            return None
        data = _read(self._answer, 0, _MOST_FLIGHT_BYTES)
        return None if data is None else data.decode("utf-8", "replace")

    def stacks(self) -> str | None:
        """Return the stacks that came with the record, the main thread last; None when there are none."""
        if _identity(self._stacks) in (None, self._stacks_before):
            return None
        data = _read(self._stacks, 0, _MOST_STACK_BYTES)
        return data.decode("utf-8", "replace") if data else None


def _thread_ids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _size(path: Path) -> int | None:
    identity = _identity(path)
    return None if identity is None else identity[2]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return (info.st_ino, info.st_mtime_ns, info.st_size) if stat.S_ISREG(info.st_mode) else None


def _read(path: Path, start: int, most: int) -> bytes | None:
    try:
        fd = open_plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(fd, "rb") as file:
        file.seek(start)
        return file.read(most)


_NS_PER_S = 1_000_000_000
_POLL_S = 0.003
# Once something was answered, the rest gets three times as long as the slowest answer took, and at least:
_LEAST_PATIENCE_S = 0.5
_HELPERS_S = 0.3  # then the others are asked by signal; a helper that is late for want of CPU time still counts
_STANDS_STILL_BELOW = 0.01  # of one core: helper threads wake up now and then
_MOST_KERNEL_FRAMES = 8
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "in uninterruptible sleep, inside the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not yet collected by its parent",
    "X": "dead",
    "I": "idle",
}


@attrs.frozen
class CpuReading:
    """CPU time of a whole process, and when it was read (monotonic clock of this host)."""

    at_ns: int
    cpu_ns: int


@attrs.frozen
class RankEvidence:
    """What one rank answered: faulthandler's text, JSON text; where one is None, `evidence` says why."""

    rank: int
    stacks: str | None
    flight: str | None
    evidence: tuple[Evidence, ...]
    signalled: bool = False
    """Whether it was asked by a signal, which its own thread handles: what moves until the next look may be that."""
    spared: bool = False
    """Whether its helper was silent and it got no signal, as it worked then: its stack is still to be had."""


def collect_evidence(
    targets: Sequence[Target],
    *,
    dump_signal: int,
    grace_s: float,
    earlier: Mapping[int, CpuReading] | None = None,
    journal: Journal | None = None,
    may_ask: Callable[[], bool] = lambda: True,
    moving: Collection[int] = (),
) -> dict[int, RankEvidence]:
    """Ask every rank for its stacks and flight record, and read /proc about it; by rank.

    Args:
        targets: The ranks' processes, pinned.
        dump_signal: `Settings.dump_signal`; 0 asks for no stacks.
        grace_s: The longest that this may take, `Settings.dump_grace`.
        earlier: CPU readings of some earlier look by rank, to tell a busy rank from one that stands still.
        journal: Gets one `dump` event.
        may_ask: Checked before each signal: False once this monitor has been replaced.
        moving: Ranks that get no signal, because they work: what they do must not be interrupted, not even a call of C
            that holds the GIL.
    """
    started_ns = time.monotonic_ns()
    # The kernel first: answering a dump costs the rank CPU time and changes what it is waiting in.
    facts = {target.rank: proc_evidence(target, (earlier or {}).get(target.rank)) for target in targets}
    helpers = [_Question(t.rank, "flight", FlightRequest(t)) for t in targets if may_ask()]
    for question in helpers:
        question.ask()
    _await_answers(helpers, started_ns, min(grace_s, _HELPERS_S))
    silent = {question.rank for question in helpers if question.answer is None}
    dumps = [
        _Question(t.rank, "stack", StackRequest(t, dump_signal))
        for t in targets
        if t.rank in silent and t.rank not in moving and may_ask()
    ]
    for question in dumps:
        question.ask()
    questions = helpers + dumps
    _await_answers(questions, started_ns, grace_s)
    for question in questions:
        if question.open:
            question.give_up()
    found = {t.rank: _of_rank(t.rank, questions, facts[t.rank], t.rank in moving) for t in targets}
    if journal is not None:
        journal.emit(
            Event.DUMP,
            ranks=sorted(found),
            stacks=sorted(rank for rank, answer in found.items() if answer.stacks is not None),
            flight_records=sorted(rank for rank, answer in found.items() if answer.flight is not None),
            took_s=(time.monotonic_ns() - started_ns) / _NS_PER_S,
        )
    return found


def proc_evidence(target: Target, earlier: CpuReading | None = None) -> tuple[Evidence, ...]:
    """Return what the kernel says about a rank: state, where it sleeps, whether it computes."""
    name = f"rank {target.rank} (pid {target.pid})"
    state = status_fields(target.pid).get("State", "")[:1]
    if not state:
        return (Evidence("proc", f"{name} is gone"),)
    waits_in = _proc_text(target.pid, "wchan").strip("\0\n ")
    where = f", waiting in {waits_in}" if state in "SD" and waits_in not in ("", "0") else ""
    lines = [Evidence("proc", f"{name} is {_STATES.get(state, 'in state ' + state)} (state {state}){where}")]
    now = read_cpu(target.pid)
    if earlier is not None and now is not None and now.at_ns > earlier.at_ns:
        used_s = max(0, now.cpu_ns - earlier.cpu_ns) / _NS_PER_S
        over_s = (now.at_ns - earlier.at_ns) / _NS_PER_S
        moving = "stands still" if used_s < _STANDS_STILL_BELOW * over_s else "moves"
        text = f"the CPU time of rank {target.rank} {moving}: {used_s:.2f} s in the last {over_s:.2f} s"
        lines.append(Evidence("proc", text))
    if kernel := _proc_text(target.pid, "stack"):  # readable for root only
        frames = [line.split()[-1].partition("+")[0] for line in kernel.splitlines() if line.strip()]
        inside = " < ".join(frames[:_MOST_KERNEL_FRAMES])
        lines.append(Evidence("kernel", f"kernel stack of rank {target.rank}, innermost first: {inside}"))
    return tuple(lines)


def read_cpu(pid: int) -> CpuReading | None:
    """Return the CPU time of all threads of a process, or None where the kernel does not account it."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return CpuReading(time.monotonic_ns(), total)


class _Question:
    """One request to one rank and what came of it."""

    def __init__(self, rank: int, kind: str, request: StackRequest | FlightRequest) -> None:
        self.rank = rank
        self.kind = kind
        self.answer: str | None = None
        self.after_ns = 0
        self.why_not: str | None = None
        self._request = request
        self._sent_ns = 0

    @property
    def stacks(self) -> str | None:
        """Stacks of all threads, where a helper has written them."""
        return self._request.stacks() if self.answer and isinstance(self._request, FlightRequest) else None

    @property
    def open(self) -> bool:
        return self.answer is None and self.why_not is None

    def ask(self) -> None:
        self._sent_ns = time.monotonic_ns()
        self.why_not = self._request.send()

    def look(self) -> None:
        self.answer = self._request.poll()
        self.after_ns = time.monotonic_ns() - self._sent_ns
        if self.answer is None and not self._request.target.alive:
            self.why_not = "it died before it answered"

    def give_up(self) -> None:
        waited_s = (time.monotonic_ns() - self._sent_ns) / _NS_PER_S
        self.why_not = f"no answer within {waited_s:.1f} s"
        if isinstance(self._request, StackRequest):
            self.answer = self._request.partial()
            self.why_not = "its dump is incomplete" if self.answer else self.why_not
        else:
            self.why_not += "; something holds its GIL, or it is inside the kernel"


def _await_answers(questions: Sequence[_Question], started_ns: int, grace_s: float) -> None:
    """Poll until all have answered, the grace is over, or the late ones are far later than the others."""
    grace_ns = int(grace_s * _NS_PER_S)
    while still := [question for question in questions if question.open]:
        for question in still:
            question.look()
        slowest_ns = max((q.after_ns for q in questions if q.answer is not None), default=grace_ns)
        patience_ns = max(3 * slowest_ns, int(_LEAST_PATIENCE_S * _NS_PER_S))
        if time.monotonic_ns() - started_ns >= min(grace_ns, patience_ns):
            break
        time.sleep(_POLL_S)


def _of_rank(rank: int, questions: Sequence[_Question], facts: tuple[Evidence, ...], is_moving: bool) -> RankEvidence:
    mine = {question.kind: question for question in questions if question.rank == rank}
    flight, dump = mine.get("flight"), mine.get("stack")
    stacks = (flight.stacks if flight else None) or (dump.answer if dump else None)
    lines = list(facts)
    if stacks is None or (dump is not None and dump.why_not is not None and stacks == dump.answer):
        what = f"no stacks from rank {rank}" if stacks is None else f"incomplete stacks from rank {rank}"
        lines.append(Evidence("stack", f"{what}: {_why_not(dump, is_moving)}"))
    if flight is None or flight.why_not is not None:
        lines.append(Evidence("flight", f"no flight record from rank {rank}: {_why_not(flight, False)}"))
    return RankEvidence(
        rank,
        stacks,
        flight.answer if flight else None,
        tuple(lines),
        signalled=dump is not None,
        spared=stacks is None and dump is None and is_moving,
    )


def _why_not(question: _Question | None, is_moving: bool) -> str:
    if question is None and is_moving:
        return "it works, and who works is not interrupted by a signal"
    if question is None:
        return "it was not asked, another monitor has taken over"
    return question.why_not or "it did not write them"


def _proc_text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


@attrs.frozen
class CloseLook:
    """Evidence about all ranks from one moment, and where each rank stood then."""

    places: Mapping[int, object]
    frames: Mapping[int, tuple[str, ...]]
    flight: Mapping[int, FlightRecord | None]
    positions: Mapping[int, Mapping[str, CollectivePosition]]
    texts: Mapping[int, str]
    """Whole stack dumps, as written."""
    facts: tuple[Evidence, ...]
    cpu: Mapping[int, CpuReading]
    answered: frozenset[int] = frozenset()
    """Ranks whose helper thread has answered, so that nothing held their GIL."""
    signalled: frozenset[int] = frozenset()
    """Ranks that were asked by a signal."""
    threads: Mapping[int, tuple[ThreadStack, ...]] = attrs.field(factory=dict)
    """By rank, the stacks of all threads but the one that beats, where a helper thread has written them."""
    spared: frozenset[int] = frozenset()
    """Ranks that gave no stack and were not asked by a signal, because they worked at that moment."""

    @classmethod
    def of(cls, ranks: Sequence[WatchedRank], found: Mapping[int, RankEvidence]) -> CloseLook:
        """Read the answers of the ranks."""
        frames: dict[int, tuple[str, ...]] = {}
        others: dict[int, tuple[ThreadStack, ...]] = {}
        flight: dict[int, FlightRecord | None] = {}
        positions: dict[int, Mapping[str, CollectivePosition]] = {}
        elsewhere = {w.rank: thread for w in ranks if (thread := beating_thread(w)) != w.snapshot.pid}
        for rank, evidence in found.items():
            if evidence.stacks:
                threads = parse_faulthandler(evidence.stacks)
                own = frames_of(threads, elsewhere[rank]) if rank in elsewhere else main_frames(threads)
                frames.update({rank: own} if own else {})
                others[rank] = tuple(thread for thread in threads if thread.frames != own)
            record = parse_flight_record(evidence.flight) if evidence.flight else None
            flight[rank] = record
            if record is not None:
                positions[rank] = record.positions()
        return cls(
            places={watched.rank: place(watched) for watched in ranks},
            frames=frames,
            flight=flight,
            positions=positions,
            texts={rank: evidence.stacks for rank, evidence in found.items() if evidence.stacks},
            facts=tuple(line for evidence in found.values() for line in evidence.evidence),
            answered=frozenset(rank for rank, evidence in found.items() if evidence.flight is not None),
            signalled=frozenset(rank for rank, evidence in found.items() if evidence.signalled),
            threads=others,
            spared=frozenset(rank for rank, evidence in found.items() if evidence.spared),
            cpu={w.rank: reading for w in ranks if (reading := read_cpu(w.snapshot.pid)) is not None},
        )

    def covers(self, ranks: Sequence[WatchedRank]) -> bool:
        """Tell whether no rank has moved since the look."""
        return self.places == {watched.rank: place(watched) for watched in ranks}


def beating_thread(watched: WatchedRank) -> int:
    """Return the id of the thread whose progress is watched; that of completed collectives is told by a helper."""
    snapshot = watched.snapshot
    return snapshot.pid if snapshot.beat_source == "collectives" else snapshot.main_lane.thread_id or snapshot.pid


def place(watched: WatchedRank) -> object:
    """Return what changes when a rank does anything."""
    snapshot = watched.snapshot
    lane = snapshot.main_lane
    return (snapshot.pid, watched.alive, snapshot.exit_state, lane.last_ns, lane.beats, lane.stack)


def states_of(
    ranks: Sequence[WatchedRank], node: str, *, closely: bool, look: CloseLook | None, now_ns: int
) -> list[RankState]:
    """Return the ranks as the analysis takes them; with `closely` /proc is read, which costs."""
    return [_state(watched, node, closely, look, now_ns) for watched in ranks]


def _state(watched: WatchedRank, node: str, closely: bool, look: CloseLook | None, now_ns: int) -> RankState:
    rank, pid = watched.rank, watched.snapshot.pid
    snapshot = watched.snapshot if watched.readable else None
    state = RankState(rank=rank, node=node, alive=watched.alive, snapshot=snapshot)
    if not closely or not watched.alive:
        return state
    state = attrs.evolve(
        state,
        process_state=process_state(pid) or "",
        traced=procfs.is_traced(pid),
        reads_terminal=procfs.reads_terminal(pid),
    )
    if look is None or look.places.get(rank) != place(watched):
        return state
    frames = look.frames.get(rank)
    earlier, latest = look.cpu.get(rank), read_cpu(pid)
    share = None
    if earlier is not None and latest is not None and latest.at_ns - earlier.at_ns > 50_000_000:
        share = (latest.cpu_ns - earlier.cpu_ns) / (latest.at_ns - earlier.at_ns)
    return attrs.evolve(
        state,
        collectives=look.positions.get(rank),
        in_collective=is_in_collective(frames) if frames else None,
        slow_work=busy_with(frames) if frames else None,
        cpu_share=share,
    )
