"""The incident record: plain values, and their JSON with every key always present.

Reading is forgiving, because a report may come from another version, a full disk or an editor: unknown keys
are ignored, and a value of the wrong shape counts as missing. Only `incidents` does I/O.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.incidents.steps import step_words

KINDS = ("crash", "hang", "slow", "preemption", "numerics")
CURE = "cure"
"""The source of evidence that tells what to change."""
ACTIONS = ("restart", "exclude_node", "wait", "rollback", "requeue", "stop", "none")


_PACKAGE = Path(__file__).resolve().parent.parent
_STARTERS = (
    f"{_PACKAGE / 'launcher'}{os.sep}",
    f"{_PACKAGE / 'auto.py'}:",
    f"{_PACKAGE / '__main__.py'}:",
    "<frozen runpy>:",
    f"{Path(os.__file__).with_name('runpy.py')}:",
)


@attrs.frozen
class Evidence:
    """One observation: where it comes from (`exit`, `proc`, `stack`, `flight`, ...) and what it says."""

    source: str
    text: str


def without_own_frames(frames: Iterable[str]) -> tuple[str, ...]:
    """Return a stack (`file:line function`, innermost first) without what started the script, at its outer end.

    Frames of ours further in stay: there the script called us. A stack of nothing else is left as it is.
    """
    kept = list(frames)
    while kept and kept[-1].startswith(_STARTERS):
        kept.pop()
    if len(kept) > 1 and kept[-1].startswith("<string>:") and kept[-2].startswith(_STARTERS[:3]):
        return without_own_frames(kept[:-1])  # the one line that a new interpreter is started with
    return tuple(kept or frames)


@attrs.frozen
class Culprit:
    """A rank that the evidence names, and where it was. `stack`: `file:line function`, innermost first."""

    rank: int
    node: str | None = None
    step: int | None = None
    section: str | None = None
    stack: tuple[str, ...] = attrs.field(default=(), converter=without_own_frames)
    step_is_global: bool | None = None
    """Whether `step` counts over attempts; if False, it counts the heartbeats of this attempt, from 0."""

    @property
    def told_step(self) -> str:
        """The step in words, nothing where it is not known."""
        return "" if self.step is None else step_words(self.step, self.step_is_global)


@attrs.frozen(kw_only=True)
class Incident:
    """One fault of one attempt. Times are Unix seconds, durations seconds; None means not known.

    `id` is given by `IncidentStore.create`. `culprits` may be empty: "cannot tell" is an answer.
    `lost_steps` stays None unless steps are global.
    """

    id: str | None = None
    kind: str | None = None
    attempt: int | None = None
    detected_at: float | None = None
    detection_latency_s: float | None = None
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    category: str | None = "unknown"
    cause: str | None = "unknown"
    action: str | None = "restart"
    confidence: float | None = None
    evidence: tuple[Evidence, ...] = ()
    recovered_at: float | None = None
    recovery_s: float | None = None
    lost_steps: int | None = None

    @property
    def observed(self) -> tuple[Evidence, ...]:
        """What was seen: the evidence without the advice."""
        return tuple(one for one in self.evidence if one.source != CURE)

    @property
    def advice(self) -> str | None:
        """What to change in this very job, beside what `action` says of all such incidents."""
        return "; ".join(one.text for one in self.evidence if one.source == CURE) or None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values: every stable key, null for what is missing or not finite."""
        data = attrs.asdict(self)
        for name in ("detected_at", "detection_latency_s", "confidence", "recovered_at", "recovery_s"):
            data[name] = _number(data[name])
        for culprit in data["culprits"]:
            culprit["stack"] = list(culprit["stack"])
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}

    @classmethod
    def from_json(cls, data: object) -> Incident:
        """Build a record from whatever was read; what is missing or misshapen becomes None or empty."""
        values = data if isinstance(data, dict) else {}
        confidence = _number(values.get("confidence"))
        return cls(
            id=_text(values.get("id")),
            kind=_text(values.get("kind")),
            attempt=_integer(values.get("attempt")),
            detected_at=_number(values.get("detected_at")),
            detection_latency_s=_number(values.get("detection_latency_s")),
            culprits=tuple(c for item in _items(values.get("culprits")) if (c := _culprit(item))),
            victims=tuple(r for item in _items(values.get("victims")) if (r := _integer(item)) is not None),
            category=_text(values.get("category")),
            cause=_text(values.get("cause")),
            action=_text(values.get("action")),
            confidence=None if confidence is None else min(1.0, max(0.0, confidence)),
            evidence=tuple(e for item in _items(values.get("evidence")) if (e := _evidence(item))),
            recovered_at=_number(values.get("recovered_at")),
            recovery_s=_number(values.get("recovery_s")),
            lost_steps=_integer(values.get("lost_steps")),
        )


def event_fields(incident: Incident) -> dict[str, Any]:
    """Return what the journal's `incident` event says of it; what is decided from the journal needs all of these."""
    return {
        "id": incident.id,
        "kind": incident.kind,
        "culprits": [culprit.rank for culprit in incident.culprits],
        "cause": incident.cause,
        "category": incident.category,
        "action": incident.action,
    }


def _culprit(data: object) -> Culprit | None:
    if not isinstance(data, dict) or (rank := _integer(data.get("rank"))) is None:
        return None
    return Culprit(
        rank=rank,
        node=_text(data.get("node")),
        step=_integer(data.get("step")),
        section=_text(data.get("section")),
        stack=tuple(line for line in _items(data.get("stack")) if isinstance(line, str)),
        step_is_global=is_global if isinstance(is_global := data.get("step_is_global"), bool) else None,
    )


def _evidence(data: object) -> Evidence | None:
    if not isinstance(data, dict) or (text := _text(data.get("text"))) is None:
        return None
    return Evidence(source=_text(data.get("source")) or "unknown", text=text)


def _items(value: object) -> Iterable[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits is JSON too
        return None
    return number if math.isfinite(number) else None
