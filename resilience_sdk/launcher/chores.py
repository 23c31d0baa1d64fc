"""What a launcher does now and then while its ranks run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.beside import Beside
from resilience_sdk.lease import RENEW_INTERVAL_S, Lease
from resilience_sdk.monitor.spawn import MonitorWatch

_LOOK_EVERY_S = 1.0


class Chores:
    """What has to be done now and then while ranks run: the lease, a living monitor, and what runs beside the ranks."""

    def __init__(self, lease: Lease, journal: Journal, pages: Path | None, beside: Beside) -> None:
        """Renew `lease` from now on; each call sees to `beside`, and to the monitor that watches `pages`."""
        self._lease = lease
        self._journal = journal
        self._monitor = None if pages is None else MonitorWatch(pages)
        self._beside = beside
        self._looked: float | None = None
        self._over = threading.Event()
        # A thread, because the main one may wait for minutes: for other nodes, or for ranks that save and leave.
        self._renewer = threading.Thread(target=self._renew, name="resilience-lease", daemon=True)
        self._renewer.start()

    def close(self) -> None:
        """Stop renewing the lease, so that it can be released."""
        self._over.set()
        self._renewer.join(RENEW_INTERVAL_S)

    def _renew(self) -> None:
        while not self._over.wait(RENEW_INTERVAL_S):
            if not self._lease.renew():
                place = self._lease.path.parent
                say_once("lease-lost", f"another job took {place} over; both write there now")

    def __call__(self) -> None:
        """See to all of our processes. Main thread."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        if self._monitor is not None:
            try:
                self._monitor.keep_alive()
            except Exception as error:  # noqa: BLE001 - without a monitor the ranks run all the same
                if say_once("monitor", f"the monitor cannot be started, hangs are not detected: {error}"):
                    self._journal.emit(Event.DEGRADED, what="monitor", why=str(error))
        self._beside.keep_alive()
