"""Where `numerics.check` ended attempts, from the journal: checkpoints to pass over, batches to leave out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.events import Event

_LEFT = ("rollback", "restart")  # what the rank did that emitted it: `restart` reads the same batches again
_CLOCKS_APART_S = 600.0  # by which the clocks of two nodes may differ


@attrs.frozen
class Rollback:
    """One way back: the step whose numbers were bad, and when its attempt was over.

    `until` (Unix seconds of rank 0's node, which writes the manifests) is infinite where no attempt has followed yet.
    """

    step: int
    what: str
    until: float
    skip_batches: int

    def why_bad(self, step: int, created_at: float) -> str | None:
        """Return why the checkpoint after `step` completed steps, written then, is not to be resumed; or None."""
        if step <= self.step or created_at >= self.until:
            return None
        return f"it was saved after step {self.step}, at which {self.what}"


def find_rollbacks(events: Iterable[Mapping[str, Any]]) -> tuple[Rollback, ...]:
    """Return the rollbacks among journal events in order of time; a step that is no global one says nothing."""
    events = tuple(events)
    starts = [e for e in events if e.get("event") == Event.RANK_START.value and e.get("rank") == 0]
    return tuple(
        Rollback(
            event["step"],
            f"{event.get('what')} was {event.get('found')}",
            min((float(start["t"]) for start in starts if _follows(start, event)), default=float("inf")),
            _count(event.get("skip_batches")),
        )
        for event in events
        if _is_rollback(event)
    )


def skipped_steps(rollbacks: Iterable[Rollback]) -> list[int]:
    """Return the numbers of the steps whose batches are left out, sorted."""
    return sorted({step for back in rollbacks for step in range(back.step, back.step + back.skip_batches)})


def _is_rollback(event: Mapping[str, Any]) -> bool:
    return (
        event.get("event") == Event.NUMERICS.value
        and event.get("action") in _LEFT
        and event.get("is_global") is True
        and isinstance(event.get("step"), int)
    )


def _follows(start: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Tell whether rank 0 started after the rollback; its clock may be another one, so attempts count first."""
    ahead_s = float(start["t"]) - float(event["t"])
    attempt, before = start.get("attempt"), event.get("attempt")
    is_of_job = start.get("job") == event.get("job")
    if is_of_job and isinstance(attempt, int) and isinstance(before, int) and attempt > before:
        return ahead_s > -_CLOCKS_APART_S
    return ahead_s > 0


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000 else 0
