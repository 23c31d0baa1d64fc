"""Evidence from all ranks of a node at once: stacks, flight records, and what the kernel says about each.

All requests go out before the first answer is awaited, so the whole takes as long as the slowest rank, and
at most the grace that the settings give. A rank that does not answer is evidence too, and is said.

The helper threads are asked first, which is safe whatever a rank is doing. Only who is silent then, because
something holds its GIL, gets the dump signal: its frames cannot change while a signal handler reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from resilience_sdk.events import Event
from resilience_sdk.incidents.record import Evidence
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.procfs import status_fields
from resilience_sdk.monitor.requests import FlightRequest, StackRequest
from resilience_sdk.monitor.targets import Target

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


def collect_evidence(
    targets: Sequence[Target],
    *,
    dump_signal: int,
    grace_s: float,
    earlier: Mapping[int, CpuReading] | None = None,
    journal: Journal | None = None,
    may_ask: Callable[[], bool] = lambda: True,
) -> dict[int, RankEvidence]:
    """Ask every rank for its stacks and flight record, and read /proc about it; by rank.

    Args:
        targets: The ranks' processes, pinned.
        dump_signal: `Settings.dump_signal`; 0 asks for no stacks.
        grace_s: The longest that this may take, `Settings.dump_grace`.
        earlier: CPU readings of some earlier look by rank, to tell a busy rank from one that stands still.
        journal: Gets one `dump` event.
        may_ask: Checked before each signal: False once this monitor has been replaced.
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
        _Question(t.rank, "stack", StackRequest(t, dump_signal)) for t in targets if t.rank in silent and may_ask()
    ]
    for question in dumps:
        question.ask()
    questions = helpers + dumps
    _await_answers(questions, started_ns, grace_s)
    for question in questions:
        if question.open:
            question.give_up()
    found = {target.rank: _of_rank(target.rank, questions, facts[target.rank]) for target in targets}
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


def _of_rank(rank: int, questions: Sequence[_Question], facts: tuple[Evidence, ...]) -> RankEvidence:
    mine = {question.kind: question for question in questions if question.rank == rank}
    flight, dump = mine.get("flight"), mine.get("stack")
    stacks = (flight.stacks if flight else None) or (dump.answer if dump else None)
    lines = list(facts)
    if stacks is None or (dump is not None and dump.why_not is not None and stacks == dump.answer):
        what = f"no stacks from rank {rank}" if stacks is None else f"incomplete stacks from rank {rank}"
        lines.append(Evidence("stack", f"{what}: {_why_not(dump)}"))
    if flight is None or flight.why_not is not None:
        lines.append(Evidence("flight", f"no flight record from rank {rank}: {_why_not(flight)}"))
    return RankEvidence(rank, stacks, flight.answer if flight else None, tuple(lines))


def _why_not(question: _Question | None) -> str:
    if question is None:
        return "it was not asked, another monitor has taken over"
    return question.why_not or "it did not write them"


def _proc_text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
