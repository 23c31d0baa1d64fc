"""The base of experiment trackers: the metrics as curves over the training's steps."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence

import attrs

from resilience_sdk.telemetry.metrics import NAMESPACE, NEWEST, Durations, Sample, clean_time
from resilience_sdk.telemetry.sinks.base import Metrics, Sink, TelemetryOrigin
from resilience_sdk.telemetry.tail import Line

_NOT_DRAWN = frozenset(
    {"run.info", "journal.lines", "journal.torn_lines", "journal.last_timestamp", "telemetry.timestamp"}
) | frozenset(NEWEST.values())
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./ -]")  # what all of the trackers take


@attrs.frozen
class Point:
    """One value of one curve."""

    name: str
    value: float
    step: int
    at: float
    """Unix seconds."""


def curve_name(sample: Sample) -> str:
    """Return what the curve of a sample is called: `resilience/incidents/hang/network/link_down`."""
    return "/".join(_NOT_IN_A_NAME.sub("_", part) for part in (NAMESPACE, sample.family.name, *sample.labels))


def points(samples: Iterable[Sample], *, step: int, at: float) -> Iterator[Point]:
    """Yield a point for each sample; of durations the newest."""
    for sample in samples:
        if sample.family.name not in _NOT_DRAWN:
            value = sample.value.last_s if isinstance(sample.value, Durations) else sample.value
            yield Point(curve_name(sample), value, step, at)


class Tracker(Sink):
    """A sink of points: what an event has changed, at its step and time, and every interval what the ranks do."""

    def __init__(self, place: TelemetryOrigin) -> None:
        """Begin with no curves."""
        super().__init__(place)
        self._metrics = Metrics(place)

    def digest(self, line: Line) -> Sequence[Point]:
        """Return the points of what has changed."""
        changed = self._metrics.apply(line.event)
        return tuple(points(changed, step=self._metrics.tally.step, at=clean_time(float(line.event["t"]))))

    def live_points(self) -> list[Point]:
        """Return the points of this moment, at the step of the rank that is furthest."""
        samples = self._metrics.now()
        steps = [int(sample.value) for sample in samples if sample.family.name == "rank.step"]  # type: ignore[arg-type]
        return list(points(samples, step=max(steps, default=self._metrics.tally.step), at=time.time()))
