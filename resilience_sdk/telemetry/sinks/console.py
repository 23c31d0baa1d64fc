"""The events as log lines on standard error, by structlog: for people, or as JSON for what collects a pod's logs."""

from __future__ import annotations

import datetime
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.core.console import own_logger, printable
from resilience_sdk.telemetry.metrics import clean_json, clean_time
from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin
from resilience_sdk.telemetry.tail import Line

_HIDDEN = ("v", "t", "mono_ns", "boot_id", "event")
_LONG = ("settings", "trace")  # which nobody reads on a screen
_WARNINGS = frozenset({"suspect", "stall", "straggler", "degraded", "preempt_notice", "ckpt_skip"})
_NUMBERS = frozenset({"progress", "loss"})  # rows of a curve, one after the other
_ERRORS = frozenset({"confirmed", "incident", "ckpt_fail", "ckpt_quarantine"})


class Console(Sink):
    """Writes each event as one line."""

    name = "console"

    def __init__(self, place: TelemetryOrigin, form: str) -> None:
        """Write lines of this form: `text` or `json`."""
        super().__init__(place)
        self._form = form
        self._hidden = _HIDDEN + _LONG if form == "text" else _HIDDEN
        self._logger: Any = None

    def open(self) -> None:
        """Make the logger."""
        import structlog

        renderer = (
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
            if self._form == "text"
            else structlog.processors.JSONRenderer(default=str)
        )
        self._logger = own_logger(structlog.PrintLogger(sys.stderr), [renderer])

    def digest(self, line: Line) -> Sequence[Mapping[str, Any]]:
        """Every line is told; to people not those that are only drawn."""
        return () if self._form == "text" and line.event.get("event") in _NUMBERS else (line.event,)

    def send(self, items: deque[Mapping[str, Any]]) -> None:
        """Print."""
        while items:
            event = items[0]
            name = str(event["event"])
            level = "error" if name in _ERRORS else "warning" if name in _WARNINGS else "info"
            at = datetime.datetime.fromtimestamp(clean_time(float(event["t"])), datetime.timezone.utc)
            facts = {
                key: _shown(value) for key, value in event.items() if key not in self._hidden and value is not None
            }
            getattr(self._logger, level)(printable(name), level=level, timestamp=at.isoformat(), **facts)
            items.popleft()


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else clean_json(value)
