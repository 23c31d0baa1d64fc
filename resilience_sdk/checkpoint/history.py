"""What the journal of earlier attempts says about checkpoints. Pure.

Three questions: how often does this job fail (for the interval between saves), how long does a save take (for one that
has to fit into the time that is left), and after which checkpoints has the job failed soon again and again (so that a
resume had better take an older one).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.events import Event

# What is assumed of a job that nothing is known of: one failure in this time, as if it had been seen.
PRIOR_MTTF_S = 3 * 3600.0
# A failure counts against the checkpoint that the attempt began with if it came within this time after the
# resume, and before the attempt had saved another one.
SOON_S = 300.0
FAILURES_FOR_QUARANTINE = 2

_FAULTS = frozenset({"crash", "hang", "numerics"})
# What is known to have come from outside says nothing about a checkpoint, and an error in the script is repaired there.
_CATEGORIES_FROM_OUTSIDE = frozenset({"hardware", "host", "network", "scheduler", "storage", "user"})
_CAUSES_FROM_OUTSIDE = frozenset({"rank_killed_sigkill"})


@attrs.frozen
class CheckpointId:
    """One checkpoint: its name, and when it was written (Unix seconds), since a step can be saved again."""

    name: str
    created_at: float


@attrs.frozen
class Setbacks:
    """How often a run failed soon after it had been resumed from a checkpoint, and the newest incident."""

    count: int
    incident: str | None


def mean_time_to_failure_s(events: Iterable[Mapping[str, Any]], prior_s: float = PRIOR_MTTF_S) -> float:
    """Return the expected time between two failures in seconds, from journal events in order of time.

    That is (prior + time seen running) / (1 + failures seen): the posterior mean of the rate's inverse where the
    prior counts as one failure. With nothing seen it is the prior; it follows what is seen within a few failures.
    Preemptions with a notice are no failures: they lose nothing.
    """
    begun: dict[tuple[Any, Any, Any], list[float]] = {}
    failures: set[tuple[Any, ...]] = set()
    life = 0
    for event in events:
        if event.get("event") == Event.RUN_START.value:
            life += 1  # a requeued job has the same key and counts its attempts from 0 again
        attempt = (life, event.get("job"), event.get("attempt"))
        span = begun.setdefault(attempt, [float(event["t"]), 0.0])
        span[1] = float(event["t"])
        if _is_fault(event):
            failures.add((*attempt, event.get("id")))
    running_s = sum(max(0.0, last - first) for first, last in begun.values())
    return (prior_s + running_s) / (1 + len(failures))


def newest_save_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Return how many seconds the newest checkpoint took until it was committed; 0 where there is none."""
    seconds = 0.0
    for event in events:
        taken = event.get("seconds")
        if event.get("event") == Event.CKPT_COMMIT.value and isinstance(taken, (int, float)):
            seconds = float(taken)
    return seconds


def find_setbacks(events: Iterable[Mapping[str, Any]]) -> dict[CheckpointId, Setbacks]:
    """Return the failures soon after a resume, by checkpoint, from journal events in order of time.

    One attempt counts once, whatever was reported of it. A failure that is known to have come from outside
    (hardware, network, storage, a SIGKILL) does not count.
    """
    resumed: dict[tuple[Any, Any], tuple[CheckpointId, float]] = {}
    found: dict[CheckpointId, list[str | None]] = defaultdict(list)
    for event in events:
        attempt = (event.get("job"), event.get("attempt"))
        name = event.get("event")
        if name == Event.RUN_START.value:
            resumed.clear()  # a requeued job has the same key and counts its attempts from 0 again
        elif name == Event.RESUME.value:
            checkpoint, created_at = event.get("checkpoint"), event.get("created_at")
            if isinstance(checkpoint, str) and isinstance(created_at, (int, float)):
                resumed[attempt] = (CheckpointId(checkpoint, float(created_at)), float(event["t"]))
        elif name == Event.CKPT_COMMIT.value:
            resumed.pop(attempt, None)
        elif _is_fault(event) and not _is_from_outside(event) and attempt in resumed:
            identity, since = resumed.pop(attempt)
            if float(event["t"]) - since <= SOON_S:
                incident = event.get("id")
                found[identity].append(incident if isinstance(incident, str) else None)
    return {identity: Setbacks(len(ids), ids[-1]) for identity, ids in found.items()}


def find_quarantined(events: Iterable[Mapping[str, Any]]) -> dict[CheckpointId, str]:
    """Return the checkpoints that a resume passes over while there is an older one, each with the reason."""
    return {
        identity: f"the run failed soon after it was resumed from it, {seen.count} times"
        + (f" (last: {seen.incident})" if seen.incident else "")
        for identity, seen in find_setbacks(events).items()
        if seen.count >= FAILURES_FOR_QUARANTINE
    }


def _is_fault(event: Mapping[str, Any]) -> bool:
    """Tell whether it is an incident that ended an attempt; a run that was only warned of bad numbers went on."""
    is_warning = event.get("kind") == "numerics" and event.get("action") == "none"
    return event.get("event") == Event.INCIDENT.value and event.get("kind") in _FAULTS and not is_warning


def _is_from_outside(event: Mapping[str, Any]) -> bool:
    return event.get("category") in _CATEGORIES_FROM_OUTSIDE or event.get("cause") in _CAUSES_FROM_OUTSIDE
