"""One incident for one episode, whichever ranks see it: written by the first, corrected by who knows better.

A rank that has a bad loss makes its peers' gradients bad in the same step, and they may be the first to write. So
what each saw is kept beside the report (`seen.json`), under a lock, and the report follows from all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore
from resilience_sdk.numerics.anomaly import AnomalyJudgement, Trouble, is_same_episode, judge
from resilience_sdk.system import same_device
from resilience_sdk.system.file_lock import file_lock

Pages = Mapping[int, Mapping[str, Any]]

KIND = CATEGORY = "numerics"
_SEEN = "seen.json"
_MOST_SEEN = 64
_MOST_INCIDENTS = 8  # the newest ones, among which that of an episode that goes on is looked for
_PATIENCE_S = 2.0
_LONG_AGO_S = 600.0  # of another job with the same number: a requeued one counts its attempts from 0 again


@attrs.frozen
class AttemptPlace:
    """Where a trouble is seen: the job and its attempt, the node, and how many ranks there are."""

    job: str
    number: int
    world_size: int
    node: str | None = None


@attrs.frozen
class Recorded:
    """The incident as it stands now. `is_news`: it is new, or this trouble has changed whom it names."""

    incident: Incident
    is_news: bool


def record(
    store: IncidentStore, trouble: Trouble, attempt: AttemptPlace, action: str, now: float, pages: Pages
) -> Recorded | None:
    """Write the incident of a trouble, or add it to that of its episode; None where it adds nothing.

    `now` is Unix time in seconds, `pages` are those of a new incident. Raises OSError; waits for other ranks some
    seconds at most.
    """
    same_device.check(store.path)
    store.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file_lock(store.path, patience_s=_PATIENCE_S) as mine:
        known = _of_episode(store.path, trouble, attempt, now)
        if known is None:
            return Recorded(_create(store, trouble, attempt, action, now, pages), is_news=True)
        folder, seen = known
        if not mine or len(seen) >= _MOST_SEEN or trouble in seen:
            return None
        before = judge(seen, attempt.world_size)
        if trouble.order > before.first.order:
            return None  # a consequence
        seen.append(trouble)
        _write(folder, seen, attempt)
        told = judge(seen, attempt.world_size)
        changed = store.update(folder.name, **_report(told, seen, attempt))
        return Recorded(changed, is_news=told.culprits != before.culprits)


def _create(
    store: IncidentStore, trouble: Trouble, attempt: AttemptPlace, action: str, now: float, pages: Pages
) -> Incident:
    seen = [trouble]
    incident = Incident(
        attempt=attempt.number,
        detected_at=now,
        category=CATEGORY,
        action=action,
        **_report(judge(seen, attempt.world_size), seen, attempt),
    )
    incident = store.create(KIND, incident, pages=pages)
    _write(store.path / str(incident.id), seen, attempt)
    return incident


def _report(told: AnomalyJudgement, seen: list[Trouble], attempt: AttemptPlace) -> dict[str, Any]:
    """Return the fields of the incident that follow from what was seen."""
    shown = sorted(seen, key=lambda trouble: (trouble.order, trouble.rank))
    nodes = {rank: attempt.node for rank in told.culprits} if attempt.world_size == 1 else {}
    return {
        "culprits": tuple(
            Culprit(rank, nodes.get(rank), told.first.step, step_is_global=told.first.is_global)
            for rank in told.culprits
        ),
        "cause": told.first.cause,
        "confidence": told.confidence,
        "evidence": tuple(Evidence(KIND, trouble.text) for trouble in shown[:8]),
    }


def _of_episode(
    incidents: Path, trouble: Trouble, attempt: AttemptPlace, now: float
) -> tuple[Path, list[Trouble]] | None:
    newest = sorted(incidents.glob(f"[0-9]*-{KIND}"), key=lambda path: int(path.name.split("-")[0]), reverse=True)
    for folder in newest[:_MOST_INCIDENTS]:
        seen = _read(folder, attempt, now)
        if seen and is_same_episode(trouble, seen):
            return folder, seen
    return None


def _read(folder: Path, attempt: AttemptPlace, now: float) -> list[Trouble]:
    try:
        data = json.loads(read_text(folder / _SEEN))
        is_old = now - (folder / _SEEN).stat().st_mtime > _LONG_AGO_S
        if is_old or (data["job"], data["attempt"]) != (attempt.job, attempt.number):
            return []
        return [Trouble(**entry) for entry in data["seen"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _write(folder: Path, seen: list[Trouble], attempt: AttemptPlace) -> None:
    data = {"job": attempt.job, "attempt": attempt.number, "seen": [attrs.asdict(trouble) for trouble in seen]}
    write_whole(folder / _SEEN, json.dumps(data))
