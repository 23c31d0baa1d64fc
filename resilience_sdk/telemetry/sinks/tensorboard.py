"""TensorBoard: event files that it draws, written with its own writer: neither torch nor TensorFlow is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.telemetry.metrics import NAMESPACE
from resilience_sdk.telemetry.sinks.base import Point, ReportPage, TelemetryOrigin, Tracker, load


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

    def draw(self, some: Sequence[Point]) -> None:
        """Write and flush."""
        for point in some:
            self._writer.add_scalar(point.name, point.value, point.step, wall_time=point.at)
        self._writer.flush()

    def attach(self, page: ReportPage) -> None:
        """Say as a text where the page is: TensorBoard shows no HTML of others. In an event file of its own."""
        writers = load("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        events = load("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        texts = load("tensorboard.plugins.text.summary", extra="tensorboard")
        summary = texts.text_pb(f"{NAMESPACE}/report", f"The report of this run: `{page.path}`")
        writer = writers.EventFileWriter(str(self._directory))
        writer.add_event(events.Event(wall_time=page.at, step=page.step, summary=summary))
        writer.close()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
