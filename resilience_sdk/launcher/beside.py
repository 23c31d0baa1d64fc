"""What runs beside the ranks of a node in processes of its own: the exporter of telemetry, the watch over its health.

Processes, and started by name, because the libraries of the sinks and the drivers of the hardware must neither cost
the launcher memory nor be able to hurt it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from resilience_sdk import environ
from resilience_sdk.hostinfo import process_start_ticks
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.kept_process import KeptProcess
from resilience_sdk.settings import Settings

DELIVERY_S = 2.0  # healthy sinks take milliseconds; for one that is dead nobody waits longer
_EXPORTER = "from resilience_sdk.telemetry.__main__ import main; os._exit(main(['--from-launcher']))"
_WATCH = "from resilience_sdk.health.watch import main; main()"
_WATCH_AFTER_S = 10.0  # not while the ranks start, which is when every processor is wanted


class Beside:
    """The processes beside the ranks of one node. Main thread; never raises, waits only in `close`."""

    def __init__(self, run_dir: Path, job: str, settings: Settings, pages: Path | None, journal: Journal) -> None:
        """Serve the run in `run_dir`, as far as the settings ask for it and the SDK is not disabled."""
        on = not environ.is_disabled(environ.environment())
        began = time.time()
        common: dict[str, Any] = {"run_dir": str(run_dir), "job": job, "pages": None if pages is None else str(pages)}

        def exporting() -> bytes:
            return _task({**common, "settings": settings.to_json()})

        def watching() -> bytes:
            return _task({**common, "interval_s": settings.health_interval, "since": began})

        wanted = settings.asks_for_telemetry and on
        self._exporter = KeptProcess("telemetry", "the exporter", _EXPORTER, exporting if wanted else None, journal)
        watched = settings.health_interval > 0 and on
        self._watch = KeptProcess(
            "health",
            "the watch",
            _WATCH,
            watching if watched else None,
            journal,
            delay_s=min(_WATCH_AFTER_S, settings.health_interval),
        )

    def keep_alive(self) -> None:
        """Start what does not run."""
        self._exporter.keep_alive()
        self._watch.keep_alive()

    def close(self) -> None:
        """End the watch, then let the sinks take what is left, for a moment."""
        self._watch.close(DELIVERY_S)
        self._exporter.close(DELIVERY_S)


def _task(what: dict[str, Any]) -> bytes:
    pid = os.getpid()
    return json.dumps({**what, "parent_pid": pid, "parent_ticks": process_start_ticks(pid)}).encode()
