"""What the journal says about a run: a pure function of its events.

Fields may be missing, of another version or of the wrong type; what cannot be understood is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.events import Event

_BEGINNINGS = frozenset({Event.RUN_START.value, Event.ATTEMPT_START.value, Event.RANK_START.value})
_OF_CHECKPOINTS = frozenset(
    {Event.CKPT_COMMIT.value, Event.RESUME.value, Event.CKPT_SKIP.value, Event.CKPT_QUARANTINE.value}
)
_MOST_DEGRADED = 20


@attrs.define
class RankState:
    """A rank of the newest attempt, as its events tell."""

    rank: int
    host: str | None = None
    state: str = "started"  # started, stepping, exited
    exit_code: int | None = None
    signal: str | None = None  # the name of the signal that ended it, instead of an exit code
    step: int | None = None  # the newest step that an event of it carried
    step_is_global: bool | None = None  # False: it counts the heartbeats of the attempt, from 0
    last_event: str | None = None
    last_event_at: float | None = None


@attrs.define
class RunState:
    """The newest job of a run directory."""

    job: str | None = None
    attempt: int | None = None
    attempts: int = 0
    world_size: int | None = None
    started_at: float | None = None
    last_event: str | None = None
    last_event_at: float | None = None
    attempt_ended: bool = False
    ranks: dict[int, RankState] = attrs.field(factory=dict)
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    passed_over: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    """By step: the checkpoints newer than that one which the last resume did not take, and why."""
    degraded: list[dict[str, Any]] = attrs.field(factory=list)
    launched_on: set[str] = attrs.field(factory=set)  # hosts whose launcher has announced this job


def state_of(events: Iterable[Mapping[str, Any]]) -> RunState:
    """Return the state after `events`, which are in the order of their times.

    A new job (a requeue, a resume) starts a new count of attempts and ranks; its checkpoints go on.
    """
    state = RunState()
    for event in events:
        if _is_new_job(state, event):
            state = RunState(
                checkpoint_step=state.checkpoint_step,
                checkpoint_at=state.checkpoint_at,
                passed_over=state.passed_over,
            )
        _apply(state, event, str(event["event"]))
    return state


def _is_new_job(state: RunState, event: Mapping[str, Any]) -> bool:
    """Tell whether `event` begins another job than that of `state`.

    A requeued job has the key of the one before it; it shows when a launcher announces the job again on the
    same host, or counts its attempts from the beginning.
    """
    name = event["event"]
    if name not in _BEGINNINGS:
        return False
    if _text(event.get("job")) != state.job:
        return state.last_event is not None
    if name == Event.RUN_START.value:
        return state.attempt_ended or _text(event.get("host")) in state.launched_on
    attempt = _integer(event.get("attempt"))
    starts_over = attempt is not None and state.attempt is not None and attempt < state.attempt
    return name == Event.ATTEMPT_START.value and starts_over


def _apply(state: RunState, event: Mapping[str, Any], name: str) -> None:
    at = float(event["t"])
    state.job = state.job or _text(event.get("job"))
    state.started_at = at if state.started_at is None else state.started_at
    state.last_event, state.last_event_at = name, at
    attempt = _integer(event.get("attempt"))
    is_newer = attempt is not None and (state.attempt is None or attempt > state.attempt)
    if is_newer and name != Event.RUN_START.value:
        state.attempt, state.attempt_ended, state.ranks = attempt, False, {}
        state.attempts += 1
    if (size := _integer(event.get("world_size"))) is not None:
        state.world_size = size
    rank = _rank_of(event)
    if name == Event.RUN_START.value:
        state.launched_on |= {host} if (host := _text(event.get("host"))) else set()
    elif name == Event.ATTEMPT_END.value and attempt == state.attempt:
        state.attempt_ended = True
    elif name in _OF_CHECKPOINTS:
        _apply_to_checkpoints(state, event, name, at)
    elif name == Event.DEGRADED.value:
        words = [text for key in ("what", "why", "message") if (text := _text(event.get(key)))]
        found = {"at": at, "rank": rank, "message": ": ".join(words) or "no details"}
        state.degraded = [*state.degraded, found][-_MOST_DEGRADED:]
    if rank is not None and rank >= 0 and attempt == state.attempt:
        _apply_to_rank(state.ranks.setdefault(rank, RankState(rank)), event, name, at)


def _apply_to_checkpoints(state: RunState, event: Mapping[str, Any], name: str, at: float) -> None:
    """Keep the newest checkpoint that is good, as far as the journal knows: files are not examined here.

    A resume tells first what it passes over, from the newest down, and then what it takes. If it takes none, none is
    good.
    """
    step = _integer(event.get("step"))
    if name == Event.CKPT_COMMIT.value or name == Event.RESUME.value:
        created_at = event.get("created_at")  # of one that was resumed
        state.checkpoint_step = step
        state.checkpoint_at = float(created_at) if isinstance(created_at, (int, float)) else at
        state.passed_over = {n: item for n, item in state.passed_over.items() if step is not None and n > step}
    elif step is not None and "checkpoint" in event:  # else a save that was left out
        if state.checkpoint_step is not None and state.checkpoint_step <= step:
            state.checkpoint_step = state.checkpoint_at = None
        why = _text(event.get("why")) or "no reason given"
        state.passed_over[step] = {"step": step, "at": at, "why": why}


def _rank_of(event: Mapping[str, Any]) -> int | None:
    """Return the rank that an event is about: its writer, or the one that a launcher or monitor names."""
    return _integer(event.get("rank"))


def _apply_to_rank(rank: RankState, event: Mapping[str, Any], name: str, at: float) -> None:
    rank.host = rank.host or _text(event.get("host"))
    if name == Event.RANK_START.value:
        rank.host = _text(event.get("host")) or rank.host
        rank.state, rank.exit_code, rank.signal = "started", None, None
    elif name == Event.FIRST_BEAT.value:
        rank.state = "stepping"
    elif name == Event.RANK_EXIT.value:
        rank.state = "exited"
        rank.exit_code, rank.signal = _integer(event.get("exit_code")), _text(event.get("signal"))
    step = _integer(event.get("step"))
    if step is not None:
        is_global = event.get("step_is_global")
        rank.step, rank.step_is_global = step, is_global if isinstance(is_global, bool) else None
    rank.last_event, rank.last_event_at = name, at


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
