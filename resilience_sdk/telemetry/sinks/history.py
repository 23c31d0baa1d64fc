"""The history: takes this node's journal into an index over many runs while the job runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from resilience_sdk.core.journal import file_prefix
from resilience_sdk.errors import ConfigError
from resilience_sdk.history.indexer import Index
from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin
from resilience_sdk.telemetry.tail import Line


class HistorySink(Sink):
    """Calls the indexer when there are new lines. The index itself knows what it has taken."""

    name = "history"

    def __init__(self, place: TelemetryOrigin, database: str) -> None:
        """Index into `database`, a file or a URL."""
        super().__init__(place)
        self._database = database
        self._index: Index | None = None

    def open(self) -> None:
        """Open the index; a database that does not answer is asked again."""
        try:
            self._index = Index(self._database)
        except ConfigError as error:
            raise OSError(str(error)) from None

    def digest(self, line: Line) -> Sequence[Any]:
        """Every new line is a reason to look."""
        return (line.mark,) if line.is_new else ()

    def send(self, items: deque[Any]) -> None:
        """Take in what is there now, which is those lines at least."""
        if self._index is None:
            raise OSError("the index is closed")
        try:
            done = self._index.add([self.place.run_dir], host_prefix=file_prefix(self.place.host))
        except ConfigError as error:
            raise OSError(str(error)) from None
        if done.problems:
            raise OSError("; ".join(done.problems))
        items.clear()

    def close(self) -> None:
        """Let go of the database."""
        if self._index is not None:
            self._index.close()
        self._index = None
