"""The judge: takes the durations of all ranks window by window and says who is slow, in what and since when.

One per attempt, in the process that sees all ranks. Keeps the levels of the last windows and nothing else; no I/O, no
clock. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import attrs

from resilience_sdk.straggler.rules import Rules
from resilience_sdk.straggler.standing import Moment, Verdicts
from resilience_sdk.straggler.track import Track
from resilience_sdk.straggler.verdicts import GLOBAL, OVER, Change, Verdict
from resilience_sdk.straggler.window import (
    COMPARED,
    NOT_SEEN,
    WAITING,
    WHOLE_STEP,
    Place,
    SectionWindow,
    Window,
    median,
    recorded,
    rows_of,
    step_time,
)


class Judge:
    """Streaming verdicts over windows of a few steps.

    Ranks are compared within their role only. In sections of the kinds `compute`, `io` and `gpu`, a rank or a node is
    named; sections of the kind `comm` are used to see who waits least, and for regressions of all; the step as a
    whole names nobody.
    """

    def __init__(self, places: Mapping[int, Place], rules: Rules | None = None) -> None:
        """Begin without any history; `rules` may be replaced at any time."""
        self.rules = rules if rules is not None else Rules()
        self._places = dict(places)
        self._ranks_of = Counter(place.role for place in self._places.values())
        self._tracks: dict[tuple[str, str, str], tuple[Track, Verdicts]] = {}
        self._waits: dict[str, dict[int, float]] = {}
        self._has_sections = False

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What stands now."""
        return tuple(verdict for _, standing in self._tracks.values() for verdict in standing)

    def place(self, rank: int, place: Place) -> None:
        """Say where a rank runs. If that is new, what was known of the rank is dropped."""
        if self._places.get(rank) == place:
            return
        if rank in self._places:
            self._ranks_of[self._places[rank].role] -= 1
        self._places[rank] = place
        self._ranks_of[place.role] += 1
        for track, _ in self._tracks.values():
            track.forget(rank)

    def add(self, window: Window) -> tuple[Change, ...]:
        """Take the next window and return what has changed: verdicts found, still standing with news, and over.

        While `rules.enabled` is false nothing is kept, and what stood is over.
        """
        if not self.rules.enabled:
            return self.forget_all()
        step_s = step_time(window)
        node_of = {rank: place.node for rank, place in self._places.items()}
        changes: list[Change] = []
        self._waits |= self._waits_in(window)
        self._has_sections |= any(section.kind in COMPARED for section in window.sections)
        for section in window.sections:
            if section.kind not in COMPARED + WAITING and (self._has_sections or section.kind not in WHOLE_STEP):
                continue
            for role, rows in self._by_role(section, window.steps).items():
                moment = Moment(
                    window.first_step,
                    window.last_step,
                    step_s,
                    node_of | {rank: "" for rank in rows if rank not in node_of},
                    partial(_waits_least, self._waits.get(role, {})),
                    window.passes_per_step,
                )
                changes += self._judge(section, role, rows, moment)
        return tuple(changes)

    def forget(self, section: str, kind: str) -> tuple[Change, ...]:
        """Drop what is known of a section that is not passed any more; what stood in it is over."""
        return self._drop([key for key in self._tracks if key[:2] == (section, kind)])

    def forget_all(self) -> tuple[Change, ...]:
        """Drop what is known; what stood is over."""
        return self._drop(list(self._tracks))

    def _drop(self, keys: Sequence[tuple[str, str, str]]) -> tuple[Change, ...]:
        dropped = [standing for _, standing in map(self._tracks.pop, keys)]
        return tuple(
            Change(OVER, attrs.evolve(verdict, until_step=verdict.last_step))
            for standing in dropped
            for verdict in standing
        )

    def _judge(
        self, section: SectionWindow, role: str, rows: Mapping[int, list[float]], moment: Moment
    ) -> list[Change]:
        key = (section.name, section.kind, role)
        if key not in self._tracks:
            self._tracks[key] = Track(), Verdicts(*key)
        track, standing = self._tracks[key]
        if section.kind in COMPARED:
            whole_step_s = moment.step_s * moment.passes_per_step
            ranks = self._ranks_of[role]
            findings = track.add(rows, moment.node_of, whole_step_s, self.rules, ranks, section.amounts)
        else:
            findings = track.add_common(_shortest(rows), tuple(rows), self.rules, self._ranks_of[role])
        changes = standing.settle(findings, track.level_of, moment, self.rules)
        if any(change.what == OVER and change.verdict.kind == GLOBAL for change in changes):
            track.restart_common()
        return changes

    def _by_role(self, section: SectionWindow, steps: int) -> dict[str, dict[int, list[float]]]:
        """Return role -> its rows; also of those roles that are known to have the section and recorded none."""
        rows = rows_of(section, steps)
        roles: dict[str, dict[int, list[float]]] = {
            role: {} for name, kind, role in self._tracks if (name, kind) == (section.name, section.kind)
        }
        for rank, row in rows.items():
            place = self._places.get(rank)
            roles.setdefault(place.role if place is not None else "", {})[rank] = row
        return roles

    def _waits_in(self, window: Window) -> dict[str, dict[int, float]]:
        """Return role -> rank -> the median seconds per step that it waits, on the device or in wall time."""
        longest: dict[tuple[int, str], float] = {}
        for section in window.sections:
            if section.kind in WAITING:
                for rank, row in section.durations_s.items():
                    if present := recorded(row):
                        key = rank, section.name
                        longest[key] = max(longest.get(key, 0.0), median(present))
        waits: dict[str, dict[int, float]] = {}
        for (rank, _), wait_s in longest.items():
            place = self._places.get(rank)
            of_role = waits.setdefault(place.role if place is not None else "", {})
            of_role[rank] = of_role.get(rank, 0.0) + wait_s
        return waits


def _waits_least(waits: Mapping[int, float], ranks: Sequence[int], excess_s: float) -> bool | None:
    """Tell whether `ranks` wait less than the others by half of what they are late, or no less than they.

    Where everybody waits for a slow rank, it is the one that has the shortest wait.
    """
    own = [waits[rank] for rank in ranks if rank in waits]
    others = [wait for rank, wait in waits.items() if rank not in ranks]
    if not own or not others:
        return None
    less = median(others) - median(own)
    if less >= 0.5 * excess_s:
        return True
    return False if less <= 0.0 else None


def _shortest(rows: Mapping[int, Sequence[float]]) -> float:
    """Return the logarithm of the shortest median wait of a rank: what is left of a wait when nobody is late."""
    waits = [median(present) for row in rows.values() if (present := [value for value in row if value == value])]
    return math.log(max(1e-9, min(waits))) if waits else NOT_SEEN
