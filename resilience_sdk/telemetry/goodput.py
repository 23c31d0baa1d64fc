"""Goodput: a pure function of the journal's events says what the time of a run went into, by its monotonic clocks.

Effective training time ratio (ETTR) = (training - lost - stalls for checkpoints) / all time since the run began. Of
each node by itself: who restarts waits for all nodes, so they hardly differ, but what was lost is journalled by the
node of rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.telemetry.metrics import FAMILIES, Sample, amount, clean_time

_NANO = 1e9
_MOST_NS = 1 << 63


@attrs.define
class Timeline:
    """Tells Unix times as a wall clock would that nobody sets: the first one of each boot counts, and time from there.

    Between two boots there is only the wall clock.
    """

    _began: dict[str, float] = attrs.field(factory=dict)
    """Of each boot, at which Unix time its monotonic clock was 0."""

    def at(self, wall_s: float, mono_ns: object, boot_id: object) -> float:
        """Return when something was; all of one host."""
        wall_s = clean_time(wall_s)
        if not isinstance(mono_ns, int) or abs(mono_ns) >= _MOST_NS or not isinstance(boot_id, str) or not boot_id:
            return wall_s
        mono_s = mono_ns / _NANO
        return clean_time(self._began.setdefault(boot_id, wall_s - mono_s) + mono_s)


_NO_ACTION = "none"


class RunPhase(str, Enum):
    """What a run is doing. Values are labels of a metric."""

    STARTING = "starting"  # until its ranks step for the first time
    TRAINING = "training"
    RECOVERING = "recovering"  # from the end of an attempt, or a fault, until all ranks of the node step again
    WAITING = "waiting"  # between two jobs: preempted and requeued, or given up until somebody starts it again


@attrs.define
class Goodput:
    """The account of one run on one node. Not thread-safe."""

    _seconds: dict[RunPhase, float] = attrs.field(factory=lambda: dict.fromkeys(RunPhase, 0.0))
    _state: RunPhase | None = None  # None before the run, and once it has finished
    _since: float = 0.0
    _last: float = 0.0
    _lost_s: float = 0.0
    _stall_s: float = 0.0
    _has_trained: bool = False
    _has_launcher: bool = False
    _attempt: tuple[str, int] | None = None
    _awaited: set[int] = attrs.field(factory=set)  # ranks of this node that have not beaten in this attempt
    _alive: set[int] = attrs.field(factory=set)  # under a foreign launcher
    _has_finished: bool = False
    _trained_before_s: float = 0.0  # this attempt
    _first_step: int = 0
    _failed: tuple[float, int] = (0.0, 0)  # seconds of training, and first step, of the attempt before
    _stands_since: float | None = None
    _shown: dict[str, float] = attrs.field(factory=dict)
    _timeline: Timeline = attrs.field(factory=Timeline)
    _newest_at: float = 0.0

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event; what cannot be understood is left out."""
        wall_s = float(event["t"])
        self._newest_at = max(self._newest_at, clean_time(wall_s))
        at = max(self._since, self.when(wall_s, event.get("mono_ns"), event.get("boot_id")))
        if (rule := _RULES.get(str(event.get("event")))) is not None:
            rule(self, event, at)
        self._last = max(self._last, at)

    @property
    def newest_at(self) -> float:
        """Unix time of the newest event, as it was written down."""
        return self._newest_at

    def when(self, wall_s: float, mono_ns: object, boot_id: object) -> float:
        """Return a moment of the node as `samples` wants it, from the clocks there."""
        return self._timeline.at(wall_s, mono_ns, boot_id)

    def samples(self, now: float | None) -> Iterator[Sample]:
        """Return the values at `now`, as `when` told it; None where the job is not running: then at the last event.

        What is counted never becomes less, though an event may come later than the moment that it tells of.
        """
        seconds = dict(self._seconds)
        if self._state is not None:
            seconds[self._state] += max(0.0, (self._last if now is None else now) - self._since)
        for state in RunPhase:
            seconds[state] = self._at_least(state.value, seconds[state])
            yield Sample(FAMILIES["run.time"], (state.value,), seconds[state])
        lost = self._at_least("lost", self._lost_s)
        yield Sample(FAMILIES["run.lost_time"], (), lost)
        if (whole := sum(seconds.values())) > 0:
            useful = max(0.0, seconds[RunPhase.TRAINING] - lost - self._stall_s)
            yield Sample(FAMILIES["run.ettr"], (), useful / whole)

    def _at_least(self, name: str, value: float) -> float:
        self._shown[name] = max(value, self._shown.get(name, 0.0))
        return self._shown[name]

    def _enter(self, state: RunPhase | None, at: float) -> None:
        if self._state is not None:
            self._seconds[self._state] += at - self._since
        self._state, self._since = state, at
        self._stands_since = None

    def _end_job(self) -> None:
        """Another job begins: one that did not tell its end was over with its last event."""
        if self._state not in (None, RunPhase.WAITING):
            self._enter(RunPhase.WAITING, max(self._since, self._last))

    def _begin(self, at: float) -> None:
        self._enter(RunPhase.RECOVERING if self._has_trained else RunPhase.STARTING, at)

    # -- rules

    def _on_run_start(self, _: Mapping[str, Any], at: float) -> None:
        self._has_launcher = True
        self._end_job()
        self._begin(at)

    def _on_attempt_start(self, event: Mapping[str, Any], at: float) -> None:
        self._has_launcher = True
        self._on_attempt(event, at)
        ranks = event.get("ranks")
        self._awaited = {rank for rank in ranks if isinstance(rank, int)} if isinstance(ranks, list) else set()

    def _on_rank_start(self, event: Mapping[str, Any], at: float) -> None:
        """Under a foreign launcher the ranks tell that an attempt began."""
        if self._has_launcher:
            return
        job, attempt = str(event.get("job")), _whole(event.get("attempt"))
        if self._attempt is not None and job != self._attempt[0]:
            self._end_job()
        if (job, attempt) != self._attempt or self._state in (None, RunPhase.WAITING):
            self._on_attempt(event, at)
            self._awaited = set()
        rank = _whole(event.get("rank"))
        self._awaited.add(rank)
        self._alive.add(rank)

    def _on_attempt(self, event: Mapping[str, Any], at: float) -> None:
        self._attempt = str(event.get("job")), _whole(event.get("attempt"))
        self._begin(at)
        self._has_finished = False
        self._alive.clear()
        trained_s = self._seconds[RunPhase.TRAINING]
        self._failed = trained_s - self._trained_before_s, self._first_step
        self._trained_before_s, self._first_step = trained_s, 0

    def _on_first_beat(self, event: Mapping[str, Any], at: float) -> None:
        self._awaited.discard(_whole(event.get("rank")))
        if not self._awaited and self._state in (RunPhase.STARTING, RunPhase.RECOVERING):
            self._has_trained = True
            self._enter(RunPhase.TRAINING, at)

    def _on_resume(self, event: Mapping[str, Any], _: float) -> None:
        self._first_step = _whole(event.get("step"))

    def _on_suspect(self, event: Mapping[str, Any], at: float) -> None:
        suspects = event.get("suspects")
        stood_s = [
            _seconds_of(suspect.get("elapsed_s"))
            for suspect in (suspects if isinstance(suspects, list) else ())
            if isinstance(suspect, Mapping)
        ]
        self._stands_since = at - max(stood_s, default=0.0)

    def _on_incident(self, event: Mapping[str, Any], at: float) -> None:
        if self._state is not RunPhase.TRAINING or event.get("action") == _NO_ACTION:
            return
        stood_s = 0.0 if self._stands_since is None or event.get("kind") != "hang" else at - self._stands_since
        self._enter(RunPhase.RECOVERING, at)
        self._lose(stood_s)
        self._trained_before_s += stood_s  # what the steps took is to be known without it

    def _on_rank_exit(self, event: Mapping[str, Any], at: float) -> None:
        self._alive.discard(_whole(event.get("rank")))
        if not self._has_launcher and self._has_finished and not self._alive:
            self._enter(None, at)
        elif self._state is RunPhase.TRAINING and event.get("exit_code") != 0:
            self._enter(RunPhase.RECOVERING, at)

    def _on_attempt_end(self, _: Mapping[str, Any], at: float) -> None:
        if self._state is not None:
            self._enter(RunPhase.RECOVERING, at)

    def _on_decision(self, event: Mapping[str, Any], at: float) -> None:
        if event.get("exit_code") is not None and self._state is not None:
            self._enter(None if event.get("verdict") == JobVerdict.FINISHED.value else RunPhase.WAITING, at)

    def _on_finished(self, event: Mapping[str, Any], at: float) -> None:
        if event.get("rank") is None:
            self._enter(None, at)
        self._has_finished = True  # of a rank: one fit is, and another one may follow

    def _on_commit(self, event: Mapping[str, Any], _: float) -> None:
        self._stall_s += _seconds_of(event.get("stall_s"))

    def _on_recovered(self, event: Mapping[str, Any], _: float) -> None:
        """Each lost step is priced at what one took in the attempt that failed."""
        lost_steps = _whole(event.get("lost_steps"))
        trained_s, first_step = self._failed
        if (steps := _whole(event.get("resumed_at")) + lost_steps - first_step) > 0:
            self._lose(lost_steps * trained_s / steps)

    def _lose(self, seconds: float) -> None:
        self._lost_s = min(self._lost_s + max(0.0, seconds), self._seconds[RunPhase.TRAINING])


_RULES: Mapping[str, Callable[[Goodput, Mapping[str, Any], float], None]] = {
    Event.RUN_START.value: Goodput._on_run_start,
    Event.ATTEMPT_START.value: Goodput._on_attempt_start,
    Event.RANK_START.value: Goodput._on_rank_start,
    Event.FIRST_BEAT.value: Goodput._on_first_beat,
    Event.RESUME.value: Goodput._on_resume,
    Event.SUSPECT.value: Goodput._on_suspect,
    Event.INCIDENT.value: Goodput._on_incident,
    Event.RANK_EXIT.value: Goodput._on_rank_exit,
    Event.ATTEMPT_END.value: Goodput._on_attempt_end,
    Event.DECISION.value: Goodput._on_decision,
    Event.FINISHED.value: Goodput._on_finished,
    Event.CKPT_COMMIT.value: Goodput._on_commit,
    Event.RECOVERED.value: Goodput._on_recovered,
}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else 0


def _seconds_of(value: object) -> float:
    return amount(value) or 0.0
