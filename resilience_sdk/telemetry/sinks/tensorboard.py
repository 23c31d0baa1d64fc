"""TensorBoard: event files that it draws, written with its own writer: neither torch nor TensorFlow is loaded."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from resilience_sdk.telemetry.sinks.base import Point, TelemetryOrigin, Tracker, load


class TensorBoard(Tracker):
    """Writes scalars into `DIR/<run>/<node>`."""

    name = "tensorboard"

    def __init__(self, place: TelemetryOrigin, directory: str) -> None:
        """Write below `directory`."""
        super().__init__(place)
        self._directory = Path(directory) / place.run / place.host
        self._writer: Any = None

    def open(self) -> None:
        """Begin an event file; one that an earlier exporter wrote is gone on with by TensorBoard."""
        self._writer = load("tensorboard.summary", extra="tensorboard").Writer(str(self._directory))

    def send(self, items: deque[Point]) -> None:
        """Write and flush."""
        self._write(items)
        items.clear()

    def refresh(self) -> None:
        """Write what the ranks are doing."""
        self._write(self.live_points())

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _write(self, points: deque[Point] | list[Point]) -> None:
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.step, wall_time=point.at)
        self._writer.flush()
