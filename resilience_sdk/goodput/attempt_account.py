"""The account of one attempt: what its journal tells of its training, and how its seconds are divided. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.goodput.buckets import Bucket, Trained, no_seconds, split_training
from resilience_sdk.goodput.rank_time import Spent, merge

_MOST_POINTS, _MOST_POINTS_OF_ALL = 128, 4096
_LEAST_LATE_S, _PART_OF_AGE = 2.0, 1 / 20
"""Beyond the pace at which a monitor tells, before its silence is one."""
_MOST_PACE_S = 450.0


@attrs.frozen
class _Point:
    at: float
    spent: Spent
    step: int | None
    """How many global steps were complete."""


@attrs.define
class SpentSeries:
    """What the time of a node's ranks was spent on, over the time of an attempt."""

    points: list[_Point] = attrs.field(factory=list)
    is_over: bool = False
    """Whether the ranks are gone: nothing has gone on behind the last point."""
    is_late: bool = False
    """Whether a step lasted longer than usual then."""

    def add(self, at: float, since_s: float, spent: Spent, step: int | None, most: int) -> None:
        """Add what was spent up to a moment, since the first step `since_s` before; keep so many points at most."""
        if not self.points:
            self.points.append(_Point(at - since_s, Spent(), None))
        if at < self.points[-1].at:
            return
        self.points.append(_Point(at, spent, step))
        if len(self.points) > most:
            self.points = [*self.points[:-2:2], *self.points[-2:]]

    @property
    def last_at(self) -> float:
        """Up to when it is known."""
        return self.points[-1].at

    @property
    def pace_s(self) -> float:
        """How long after the last point it may be silent."""
        age_s = self.points[-1].at - self.points[0].at
        return _LEAST_LATE_S + min(_MOST_PACE_S, age_s * _PART_OF_AGE)

    def until(self, at: float) -> Spent:
        """Return what was spent up to a moment."""
        place = bisect_right(self.points, at, key=lambda point: point.at)
        if place == 0:
            return Spent()
        before = self.points[place - 1]
        if place < len(self.points):
            after = self.points[place]
            return before.spent.towards(after.spent, (at - before.at) / (after.at - before.at))
        return before.spent.plus(self._beyond(at - before.at))

    def _beyond(self, seconds: float) -> Spent:
        """Return what the time behind the last point was: what it has been so far, and once that is late, nothing."""
        if self.is_over:
            return Spent()
        age_s = self.points[-1].at - self.points[0].at
        known_s, late_s = min(seconds, self.pace_s), max(0.0, seconds - self.pace_s)
        usual = self.points[-1].spent
        # A standstill that is over does not go on.
        if self.is_late and len(self.points) > 2 and self.points[-1].at > self.points[-2].at:
            before = self.points[-2]
            usual, age_s = usual.minus(before.spent), self.points[-1].at - before.at
        if self.is_late and usual.standing_s + usual.waiting_s > 0:
            return Spent(standing_s=seconds)
        steady = attrs.evolve(usual, standing_s=0.0)
        moving_s = max(age_s - usual.standing_s, sum(attrs.astuple(steady)))
        goes_on = steady.times(known_s / moving_s) if moving_s > 0 else Spent(productive_s=known_s)
        return attrs.evolve(goes_on, standing_s=goes_on.standing_s + late_s)

    def reached_at(self, step: int) -> float | None:
        """Return when so many global steps were complete; None where that is not known."""
        told = [point for point in self.points if point.step is not None]
        place = bisect_right(told, step, key=lambda point: point.step or 0)
        if place == 0 or not told:
            return self.points[0].at if told and told[0].step is not None and step < told[0].step else None
        before = told[place - 1]
        if place == len(told) or before.step == step:
            return before.at
        after, first = told[place], before.step or 0
        return before.at + (after.at - before.at) * (step - first) / ((after.step or 0) - first)


@attrs.define
class AttemptAccount:
    """One attempt, with what led to it and what it cost to go on after it. Times are Unix seconds."""

    job: str
    attempt: int
    began_at: float
    ended_at: float
    seconds: dict[Bucket, float] = attrs.field(factory=no_seconds)
    """By bucket; `productive` stands for all of its training, which `training` divides."""
    first_step: int | None = None
    end_step: int | None = None
    """How many global steps were completed at its end, as far as that is known."""
    completed: int | None = None
    """How many steps it has completed itself, as its ranks' heartbeats count them."""
    kept_steps: int | None = None
    """Up to which of them nothing was lost; None: all."""
    hung_s: float = 0.0
    stall_s: float = 0.0
    is_known: bool = False
    """Whether an event has told its number."""
    seen: set[str] = attrs.field(factory=set)
    """What its ranks tell of: `data`, `saves`, `evaluation`."""
    _trained: list[tuple[float, float]] = attrs.field(factory=list)
    _spent: dict[str, SpentSeries] = attrs.field(factory=dict)  # by host
    _brackets: dict[str, bool] = attrs.field(factory=dict)  # by host, as it was told last
    _data_s: dict[str, float] = attrs.field(factory=dict)
    _saves_s: dict[str, float] = attrs.field(factory=dict)

    @property
    def lost_steps(self) -> int:
        """Steps of this attempt that had to be done again."""
        return self._lost_of(self.kept_steps)

    def lost_after(self, good_step: int | None) -> int:
        """Return the same where it has ended and there is something to go on from up to a step; None: as above."""
        return self._lost_of(self.kept_steps if good_step is None else self.kept_after(good_step))

    def _lost_of(self, kept: int | None) -> int:
        return 0 if self.end_step is None or kept is None else max(0, self.end_step - kept)

    @property
    def is_bracketed(self) -> bool:
        """Whether its ranks tell where steps begin: else all that lies between two of them may be in `productive`."""
        return all(self._brackets.values())

    @property
    def told_until(self) -> float:
        """Up to when monitors have told what its time was spent on."""
        return max((series.last_at for series in self._spent.values()), default=0.0)

    def note_trained(self, began_at: float, ended_at: float) -> None:
        """Note a time in which it trained."""
        if self._trained and self._trained[-1][1] == began_at:
            began_at = self._trained.pop()[0]
        self._trained.append((began_at, ended_at))

    def note_spent(self, event: Mapping[str, Any], at: float) -> None:
        """Take what a node's monitor tells of its ranks' time up to a moment."""
        numbers = {name: _seconds(event.get(name)) for name in attrs.fields_dict(Spent)}
        host, step = str(event.get("host")), event.get("step")
        self.note_completed(event.get("completed"))
        is_global = isinstance(step, int) and not isinstance(step, bool) and step >= 0
        if is_global and isinstance(step, int):
            self.reach(step)
        self._brackets[host] = event.get("brackets_steps") is not False
        self.seen |= {str(part) for part in event.get("seen") or ()} if isinstance(event.get("seen"), list) else set()
        series = self._spent.setdefault(host, SpentSeries())
        most = max(4, min(_MOST_POINTS, _MOST_POINTS_OF_ALL // len(self._spent)))
        series.is_over, series.is_late = event.get("is_over") is True, event.get("is_late") is True
        series.add(
            at - _seconds(event.get("age_s")), _seconds(event.get("since_s")), Spent(**numbers),
            step if is_global else None, most,
        )  # fmt: skip

    def note_step_time(self, event: Mapping[str, Any]) -> None:
        """Take what a node's ranks have waited for so far."""
        if not self._spent:  # those tell it more exactly
            self.note_completed(event.get("completed"))
        host = str(event.get("host"))
        self._data_s[host] = max(_seconds(event.get("data_s")), self._data_s.get(host, 0.0))
        self._saves_s[host] = max(_seconds(event.get("saves_s")), self._saves_s.get(host, 0.0))

    def note_completed(self, steps: object) -> None:
        """Note what is told of how many steps a rank has completed in it; anything but a count is left out."""
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < 1 << 63:
            self.completed = max(steps, self.completed or 0)

    def reach(self, step: int) -> None:
        """Note that so many global steps were completed in this attempt."""
        self.end_step = max(step, self.end_step or 0)

    def rewind(self, step: int) -> None:
        """Note that training went on behind this attempt from so many completed steps."""
        self.kept_steps = self.kept_after(step)

    def kept_after(self, step: int) -> int | None:
        """Return up to which step nothing is lost once training goes on from so many completed ones."""
        if self.end_step is None or step >= self.end_step:
            return self.kept_steps
        kept = max(step, self.first_step or 0)
        return min(kept, self.end_step if self.kept_steps is None else self.kept_steps)

    def training(
        self, seconds: float, going_on: tuple[float, float] | None = None, good_step: int | None = None
    ) -> dict[Bucket, float]:
        """Divide so many seconds of training.

        Args:
            seconds: How long it has trained, `going_on` included.
            going_on: From when to when it trains now.
            good_step: Up to which step there is something to go on from, where the attempt has ended without more.
        """
        spans = [*self._trained, *([going_on] if going_on is not None else [])]
        kept = self.kept_steps if good_step is None else self.kept_after(good_step)
        steps = (self.end_step or 0) - (self.first_step or 0)
        lost_steps = self._lost_of(kept)
        share = lost_steps / steps if steps > 0 else 0.0
        saves_s = max([self.stall_s, *self._saves_s.values()])
        if not self._spent:
            return split_training(
                seconds,
                Trained(
                    hung_s=self.hung_s,
                    checkpoint_s=saves_s,
                    data_s=max(self._data_s.values(), default=0.0),
                    lost_share=share,
                ),
            )
        spent = self._within(spans)
        known = Trained(
            hung_s=self.hung_s,
            standing_s=spent.standing_s,
            checkpoint_s=max(self.stall_s, spent.saves_s),
            evaluation_s=spent.evaluation_s,
            data_s=spent.data_s,
            waiting_s=spent.waiting_s,
            productive_s=spent.productive_s,
        )
        if not lost_steps or kept is None:
            return split_training(seconds, known)
        reached = [at for series in self._spent.values() if (at := series.reached_at(kept)) is not None]
        if not reached:
            return split_training(seconds, attrs.evolve(known, lost_share=share))
        return _without_lost(seconds, known, self._within(_behind(spans, min(reached))), _behind(spans, min(reached)))

    def _within(self, spans: Iterable[tuple[float, float]]) -> Spent:
        """Return what the time of some spans was spent on, by all nodes."""
        found = Spent()
        for began_at, ended_at in spans:
            of_nodes = [series.until(ended_at).minus(series.until(began_at)) for series in self._spent.values()]
            merged = merge(of_nodes)
            # What stands on one node alone, while others work, makes those wait.
            standing_s = min(one.standing_s for one in of_nodes)
            stood_s = max(one.standing_s + one.waiting_s for one in of_nodes)
            found = found.plus(attrs.evolve(merged, standing_s=standing_s, waiting_s=stood_s - standing_s))
        return found


def _behind(spans: Iterable[tuple[float, float]], at: float) -> list[tuple[float, float]]:
    return [(max(began_at, at), ended_at) for began_at, ended_at in spans if ended_at > at]


def _without_lost(
    seconds: float, known: Trained, lost: Spent, spans: Iterable[tuple[float, float]]
) -> dict[Bucket, float]:
    lost_s = sum(ended_at - began_at for began_at, ended_at in spans)
    parts = {
        Bucket.PRODUCTIVE: lost.productive_s,
        Bucket.DATA: lost.data_s,
        Bucket.EVALUATION: lost.evaluation_s,
        Bucket.CHECKPOINT: lost.saves_s,
        Bucket.WAITING: lost.waiting_s,
    }
    outside_s = max(0.0, lost_s - sum(parts.values()) - max(lost.standing_s, known.hung_s))
    return split_training(seconds, attrs.evolve(known, lost={**parts, Bucket.OUTSIDE: outside_s}))


def _seconds(value: object) -> float:
    """Return a duration that a journal tells; 0.0 where it is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e15 else 0.0  # type: ignore[arg-type, operator]
