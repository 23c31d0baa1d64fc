"""The detector: durations of all ranks, window by window, become verdicts: who is slow, in what and since when.

One per attempt, in the process that sees all ranks: verdicts as windows fill, and the reports. It is told the time of
a pass; what it says is put back into that of a step of the training. Keeps the levels of the last windows and nothing
else; no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import attrs

from resilience_sdk.straggler.kernels import KernelTime
from resilience_sdk.straggler.regression import Common, Points, level_of, steps_of, work_of
from resilience_sdk.straggler.reports import Medians, Report, ReportMaker
from resilience_sdk.straggler.section_history import Levels, Stalls, levels_of, upper_centres
from resilience_sdk.straggler.verdicts import (
    EVERYBODY,
    GLOBAL,
    MOST_Z,
    NODE,
    OVER,
    QUIET,
    RANK,
    STALL,
    Change,
    Moment,
    Rules,
    Slowness,
    SlowVerdict,
    Subject,
    Suspicion,
    Verdicts,
)
from resilience_sdk.straggler.window_messages import Assembly, NodePieces, Piece
from resilience_sdk.straggler.windowing import (
    COMPARED,
    NOT_SEEN,
    WAITING,
    WHOLE_STEP,
    RankPlace,
    Section,
    SectionWindow,
    Window,
    centres,
    median,
    recorded,
    step_time,
    typical_s,
)

_MOST_OF_NODE = 0.75  # of the ranks of a node must be slow, for it to be the node

Rows = Mapping[int, Sequence[float]]
"""Rank -> one value per pass, NOT_SEEN where there is none."""


class Track:
    """The history of one section. Only ranks that do the same work may be given to one."""

    def __init__(self) -> None:
        """Begin without any history."""
        self._ranks: Levels[int] = Levels()
        self._nodes: Levels[str] = Levels()
        self._members: dict[str, list[int]] = {}
        self._common = Common()
        self._stalls = Stalls()

    def forget(self, rank: int) -> None:
        """Drop the history of a rank."""
        self._ranks.forget(rank)

    def restart_common(self) -> None:
        """Forget how long the section took altogether: a regression has ended, so the mixture is no baseline."""
        self._common = Common()

    def level_of(self, subject: Subject) -> float:
        """Return how slow a subject was in the newest window, as a logarithm; NOT_SEEN if it was not there."""
        what, name = subject
        if what == RANK:
            return self._ranks.newest(int(name))
        if what == NODE:
            return self._nodes.newest(str(name))
        return self._common.newest if what == EVERYBODY else NOT_SEEN

    def add(
        self, rows: Rows, amounts: Rows, node_of: Mapping[int, str], step_s: float, rules: Rules, of_ranks: int
    ) -> list[Suspicion]:
        """Take one window: durations in seconds, and how much work each pass had on the ranks that have told it.

        `step_s` is the time of a whole step, `of_ranks` how many ranks the role has.
        """
        leveled = levels_of(rows, rules.few)
        self._ranks.add(leveled)
        self._members = _by_node(rows, node_of)
        if self._members:
            whole = {node: upper_centres([rows[rank] for rank in ranks]) for node, ranks in self._members.items()}
            self._nodes.add(levels_of(whole, rules.few))
        slow_ranks = self._ranks.slow(rules)
        slow_nodes = self._slow_nodes(leveled.levels, slow_ranks, rules)
        on_slow_nodes = {rank for node in slow_nodes for rank in self._members[node]}
        slow = slow_ranks.keys() | on_slow_nodes
        healthy = {rank: row for rank, row in rows.items() if rank not in slow} or rows
        steps = steps_of(list(healthy.values()), rules.few)
        common = level_of(steps)
        if common != common:
            return []
        findings = [
            _finding(rows, (NODE, node), self._members[node], slowness) for node, slowness in slow_nodes.items()
        ]
        findings += [
            _finding(rows, (RANK, rank), (rank,), slowness)
            for rank, slowness in slow_ranks.items()
            if rank not in on_slow_nodes
        ]
        # Of two ranks the others are the faster one: half way between two, the longest stall would not be three times
        # as long.
        others = centres(rows.values()) if len(rows) > 2 else steps_of(list(rows.values()), rules.few)
        findings += [
            Suspicion((STALL, rank), (rank,), lost_s, slowness)
            for rank, (slowness, lost_s) in self._stalls.add(rows, others, step_s, rules).items()
            if rank not in slow
        ]
        points = work_of(steps, healthy, amounts, rules.few) if amounts else ()
        return findings + self.add_common(common, tuple(rows), rules, of_ranks, points)

    def add_common(
        self, level: float, ranks: tuple[int, ...], rules: Rules, of_ranks: int, points: Points = ()
    ) -> list[Suspicion]:
        """Take the logarithm of what `ranks` have in common in one window, and tell whether it has risen.

        `points` are the steps whose amount of work is known. What fewer than half of the role's ranks do, such as the
        one that saves, does not concern all of them.
        """
        if 2 * len(ranks) < of_ranks:
            return []
        self._common.add(level, points)
        few = len(ranks) < rules.few
        rise = self._common.rise()
        least = math.log1p(rules.excess_of_few if few else rules.regression)
        if rise is None or rise.z < rules.regression_z or rise.rise < least:
            return []
        slowness = Slowness(rise.rise, min(MOST_Z, rise.z), rules.regression_z, rise.middle, rise.length, few)
        excess_s = math.exp(rise.after) - math.exp(rise.before)
        return [Suspicion((EVERYBODY, ""), ranks if len(ranks) == 1 else (), excess_s, slowness)]

    def _slow_nodes(
        self, levels: Mapping[int, float], slow: Mapping[int, Slowness], rules: Rules
    ) -> dict[str, Slowness]:
        """Return the nodes of which most ranks are slow: each by itself, or all of them as much as the node is."""
        by_node = self._nodes.slow(rules) if self._members else {}
        found: dict[str, Slowness] = {}
        for node, ranks in self._members.items():
            slowness = by_node.get(node)
            if slowness is not None:
                others = recorded(value for rank, value in levels.items() if rank not in ranks)
                bound = (median(others) if others else 0.0) + 0.5 * slowness.excess
                late = sum(levels[rank] >= bound for rank in ranks)
            else:
                of_ranks = sorted((slow[rank] for rank in ranks if rank in slow), key=lambda of_rank: of_rank.excess)
                late = len(of_ranks)
                slowness = of_ranks[late // 2] if late else None
            if slowness is not None and late > 1 and late >= _MOST_OF_NODE * len(ranks):
                found[node] = slowness
        return found


def _finding(rows: Rows, subject: Subject, ranks: Sequence[int], slowness: Slowness) -> Suspicion:
    """Return what the levels say of ranks: a share of the median of all of their durations is lost."""
    own = recorded(value for rank in ranks for value in rows[rank])
    return Suspicion(subject, tuple(ranks), -math.expm1(-slowness.excess) * (median(own) if own else 0.0), slowness)


def _by_node(rows: Rows, node_of: Mapping[int, str]) -> dict[str, list[int]]:
    """Return node -> its ranks, where nodes can be told from ranks: at least two nodes, of at least two ranks each."""
    members: dict[str, list[int]] = {}
    for rank in rows:
        members.setdefault(node_of[rank], []).append(rank)
    members = {node: sorted(ranks) for node, ranks in members.items() if len(ranks) > 1}
    return members if len(members) > 1 else {}


class Judge:
    """Streaming verdicts over windows of a few steps.

    Ranks are compared within their role only. In sections of the kinds `compute`, `io` and `gpu`, a rank or a node is
    named; sections of the kind `comm`, and those that hold collectives, are used to see who waits least, and for
    regressions of all; the step as a whole names nobody.
    """

    def __init__(self, places: Mapping[int, RankPlace], rules: Rules | None = None) -> None:
        """Begin without any history; `rules` may be replaced at any time."""
        self.rules = rules if rules is not None else Rules()
        self._places = dict(places)
        self._ranks_of = Counter(place.role for place in self._places.values())
        self._tracks: dict[tuple[str, str, str], tuple[Track, Verdicts]] = {}
        self._waits: dict[Section, tuple[float, dict[int, float]]] = {}  # passes per step, and rank -> seconds
        self._has_sections = False
        self._joint: set[Section] = set()

    @property
    def verdicts(self) -> tuple[SlowVerdict, ...]:
        """What stands now."""
        return tuple(verdict for _, standing in self._tracks.values() for verdict in standing)

    def place(self, rank: int, place: RankPlace) -> None:
        """Say where a rank runs. If that is new, what was known of the rank is dropped."""
        if self._places.get(rank) == place:
            return
        if rank in self._places:
            self._ranks_of[self._places[rank].role] -= 1
        self._places[rank] = place
        self._ranks_of[place.role] += 1
        for track, _ in self._tracks.values():
            track.forget(rank)

    def add(self, window: Window) -> list[Change]:
        """Take the next window and return what has changed: verdicts found, still standing with news, and over."""
        step_s = step_time(window)
        changes = self._note_joint(window)
        self._note_waits(window)
        self._has_sections |= any(section.kind in COMPARED for section in window.sections)
        for section in window.sections:
            if section.kind in COMPARED + WAITING or (section.kind in WHOLE_STEP and not self._has_sections):
                for role, rows in self._by_role(section).items():
                    changes += self._judge(section, role, rows, window, step_s)
        return changes

    def forget(self, section: str, kind: str) -> list[Change]:
        """Drop what is known of a section that is not passed any more; what stood in it is over."""
        self._waits.pop((section, kind), None)
        return self._drop([key for key in self._tracks if key[:2] == (section, kind)])

    def forget_all(self) -> list[Change]:
        """Drop what is known; what stood is over."""
        return self._drop(list(self._tracks))

    def _drop(self, keys: Sequence[tuple[str, str, str]]) -> list[Change]:
        dropped = [standing for _, standing in map(self._tracks.pop, keys)]
        return [Change(OVER, verdict.ended()) for standing in dropped for verdict in standing]

    def _judge(self, section: SectionWindow, role: str, rows: Rows, window: Window, step_s: float) -> list[Change]:
        key = (section.name, section.kind, role)
        if key not in self._tracks:
            self._tracks[key] = Track(), Verdicts(*key)
        track, standing = self._tracks[key]
        often, of_ranks = window.passes_per_step, self._ranks_of[role]
        node_of = {rank: self._places[rank].node if rank in self._places else "" for rank in rows}
        if section.kind in COMPARED and key[:2] not in self._joint:
            findings = track.add(rows, section.amounts, node_of, step_s * often, self.rules, of_ranks)
        else:
            findings = track.add_common(_shortest(rows), tuple(rows), self.rules, of_ranks)
        waits = self._waits_in(role, often) if findings else {}
        moment = Moment(window.first_step, window.last_step, step_s, often, node_of, waits)
        changes = standing.settle(findings, track.level_of, moment, self.rules)
        if any(change.what == OVER and change.verdict.kind == GLOBAL for change in changes):
            track.restart_common()
        return changes

    def _note_joint(self, window: Window) -> list[Change]:
        """Drop what was said about sections that turn out to hold collectives: nobody knows who waited in them."""
        fresh = {(section.name, section.kind) for section in window.sections if section.is_joint} - self._joint
        self._joint |= fresh
        return [change for name, kind in sorted(fresh) for change in self.forget(name, kind)]

    def _role_of(self, rank: int) -> str:
        return self._places[rank].role if rank in self._places else ""

    def _by_role(self, section: SectionWindow) -> dict[str, dict[int, Sequence[float]]]:
        """Return role -> its rows; also of those roles that are known to have the section and recorded none."""
        roles: dict[str, dict[int, Sequence[float]]] = {
            role: {} for name, kind, role in self._tracks if (name, kind) == (section.name, section.kind)
        }
        for rank, row in section.durations_s.items():
            if any(value == value for value in row):
                roles.setdefault(self._role_of(rank), {})[rank] = row
        return roles

    def _note_waits(self, window: Window) -> None:
        for section in window.sections:
            key = section.name, section.kind
            if section.kind in WAITING or key in self._joint:
                rows = section.durations_s.items()
                waits = {rank: median(present) for rank, row in rows if (present := recorded(row))}
                self._waits[key] = window.passes_per_step, waits

    def _waits_in(self, role: str, often: float) -> dict[int, float]:
        """Return rank -> the seconds that it waits, on the device or in wall time, in what is passed so often."""
        longest: dict[tuple[int, str], float] = {}
        for (name, _), (passed, waits) in self._waits.items():
            for rank, wait_s in waits.items() if passed == often else ():
                if self._role_of(rank) == role:
                    longest[rank, name] = max(longest.get((rank, name), 0.0), wait_s)
        found: dict[int, float] = {}
        for (rank, _), wait_s in longest.items():
            found[rank] = found.get(rank, 0.0) + wait_s
        return found


def _shortest(rows: Rows) -> float:
    """Return the logarithm of the shortest median wait of a rank: what is left of a wait when nobody is late."""
    waits = [median(present) for row in rows.values() if (present := recorded(row))]
    return math.log(max(1e-9, min(waits))) if waits else NOT_SEEN


_MOST_MEDIANS = 512
_SAME_RATE = 0.2
_SILENT = 6  # times as many windows as usual came since the last one of a section: it is not passed any more
_AT_ONCE = 16_384  # durations of ranks that are judged in one go: then the monitor looks at its ranks again
_LEAST_STEP_S = 5e-3  # in a loop that is faster, the scheduler of the host makes most of the differences
_SCORED = ("compute", "io")

_Pieces = Mapping[int, Piece]
"""Node -> its part of one window."""


@attrs.define
class _Known:
    """What is known of one section."""

    often: float = 1.0  # how often it is passed in a step
    windows: int = 0  # how many of it came
    last: int = 0  # which of all windows was its last one
    apart: int = 0  # how many came from the one before it to that
    typical_s: float = 0.0
    too_short: int = 0  # its last windows that were not judged
    is_joint: bool = False
    medians: dict[int, list[float]] = attrs.field(factory=dict)  # since the last report, of each rank


class Aggregate:
    """What is known of all ranks of a job in one attempt."""

    def __init__(self, nodes: int) -> None:
        """Wait for the windows of `nodes` nodes."""
        self._judge_of_all = Judge({})
        self._maker = ReportMaker({})
        self._assembly: Assembly[Piece] = Assembly(range(nodes))
        self._known: dict[Section, _Known] = {}
        self._passing: set[Section] = set()
        self._windows = 0
        self._queue: deque[tuple[Section, _Pieces]] = deque()
        self._kernels: dict[int, tuple[KernelTime, ...]] = {}
        self._kernel_windows: dict[int, int] = {}
        self._span: tuple[int, int] | None = None
        self._step_s = 0.0

    def add(self, told: NodePieces) -> None:
        """Take the message of a node; what it repeats is dropped."""
        for rank, role in told.roles.items():
            place = RankPlace(told.name, role)
            self._judge_of_all.place(rank, place)
            self._maker.place(rank, place)
        for piece in told.pieces:
            self._assembly.offer(told.node, piece.section, piece.index, piece)
        for rank, window in told.kernels.items():
            if self._kernel_windows.get(rank) != window.window:
                self._kernel_windows[rank] = window.window
                self._kernels[rank] = window.kernels

    @property
    def verdicts(self) -> tuple[SlowVerdict, ...]:
        """What stands now."""
        return tuple(map(self._in_steps, self._judge_of_all.verdicts))

    def judge(self) -> list[Change]:
        """Judge windows that have become complete, and return what has changed.

        Of very many ranks one section at a time, so that nobody waits for this: the rest follows with the next calls.
        The waits go first, which tell something about the others.
        """
        complete = [(section, pieces) for section, _, pieces in self._assembly.take()]
        self._queue += sorted(complete, key=lambda one: (_steps_of(one[1])[1], one[0][1] not in WAITING))
        changes: list[Change] = []
        room = _AT_ONCE
        while self._queue and room > 0:
            section, pieces = self._queue.popleft()
            room -= sum(len(piece.rows) for piece in pieces.values())
            changes += self._judge(section, pieces)
        if not self._queue:
            changes += self._retire()
        return self._all_in_steps(changes)

    def end(self) -> list[Change]:
        """End all that stands: nobody is compared any more."""
        return self._all_in_steps(self._judge_of_all.forget_all())

    def report(self, relative_threshold: float, individual_threshold: float) -> Report | None:
        """Return the report over what came since the last one; None if nothing did."""
        sections = {_scored_as(*section): known for section, known in self._known.items() if known.medians}
        if not sections and not self._kernels:
            return None
        rules = self._judge_of_all.rules
        medians = Medians(
            {
                name: {rank: median(values) for rank, values in known.medians.items()}
                for name, known in sections.items()
            },
            dict(self._kernels),
            {name: rules.least_excess_of_pass_s(self._step_s, known.often) for name, known in sections.items()},
            {name: known.often for name, known in sections.items()},
        )
        first, last = self._span or (None, None)
        found = self._maker.make(
            medians,
            self.verdicts,
            first_step=first,
            last_step=last,
            relative_threshold=relative_threshold,
            individual_threshold=individual_threshold,
        )
        for known in self._known.values():
            known.medians.clear()
        self._kernels.clear()
        self._span = None
        return found

    def _judge(self, section: Section, pieces: _Pieces) -> list[Change]:
        known = self._note(section, pieces)
        (name, kind), of_nodes = section, pieces.values()
        rows = {rank: row for piece in of_nodes for rank, row in piece.decoded().items()}
        amounts = {rank: row for piece in of_nodes for rank, row in piece.amounts().items()}
        window = SectionWindow(name, kind, rows, amounts, is_joint=known.is_joint)
        known.typical_s = typical_s(window)
        if kind in COMPARED and not known.is_joint:
            _remember(known, rows)
        told_s = [piece.step_s for piece in of_nodes if piece.step_s is not None]
        if told_s:
            self._step_s = median(told_s)
            if self._step_s < _LEAST_STEP_S:
                known.too_short += 1
                return self._judge_of_all.forget(*section) if known.too_short == QUIET else []
        known.too_short = 0
        step_s = self._step_s / known.often if told_s else self._estimated_s()
        first, last = _steps_of(pieces)
        return self._judge_of_all.add(Window(first, (window,), step_s, known.often, last))

    def _note(self, section: Section, pieces: _Pieces) -> _Known:
        """Note that a window of a section has come."""
        self._windows += 1
        self._passing.add(section)
        known = self._known.setdefault(section, _Known())
        known.windows += 1
        known.apart, known.last = self._windows - known.last, self._windows
        told = median([piece.passes_per_step for piece in pieces.values()])
        if not 0.0 < told < math.inf:
            told = 1.0  # no node of ours says that
        if known.windows == 1 or abs(told - known.often) > _SAME_RATE * known.often:
            known.often = told
        if any(piece.is_joint for piece in pieces.values()):
            known.is_joint = True
            known.medians.clear()
        first, last = _steps_of(pieces)
        self._span = (first, last) if self._span is None else (min(first, self._span[0]), max(last, self._span[1]))
        return known

    def _estimated_s(self) -> float:
        """Return how long a step takes, where no heartbeat tells: as long as its sections, of which the one that is
        passed most often is passed once.
        """
        of_all = [known for section, known in self._known.items() if section[1] in COMPARED + WAITING]
        most = max((known.windows for known in of_all), default=1)
        return sum(known.typical_s * known.windows / most for known in of_all)

    def _retire(self) -> list[Change]:
        """End what is said about sections that are not passed any more, while others are."""
        changes: list[Change] = []
        for section in sorted(self._passing):
            known = self._known[section]
            if self._windows - known.last > _SILENT * max(known.apart, len(self._passing)):
                self._passing.discard(section)
                changes += self._judge_of_all.forget(*section)
        return changes

    def _all_in_steps(self, changes: Iterable[Change]) -> list[Change]:
        return [attrs.evolve(change, verdict=self._in_steps(change.verdict)) for change in changes]

    def _in_steps(self, verdict: SlowVerdict) -> SlowVerdict:
        known = self._known.get((verdict.section, verdict.section_kind))
        return attrs.evolve(verdict, excess_s=verdict.excess_s * known.often) if known is not None else verdict


def _remember(known: _Known, rows: Mapping[int, tuple[float, ...]]) -> None:
    """Keep the median of each rank for the report."""
    for rank, row in rows.items():
        if present := recorded(row):
            values = known.medians.setdefault(rank, [])
            values.append(median(present))
            if len(values) > _MOST_MEDIANS:
                del values[::2]


def _steps_of(pieces: _Pieces) -> tuple[int, int]:
    """Return the first and the last step of a window."""
    return min(piece.first_step for piece in pieces.values()), max(piece.last_step for piece in pieces.values())


def _scored_as(name: str, kind: str) -> str:
    """Return the name under which a section stands in reports."""
    return name if kind in _SCORED else f"{name} ({kind})"
