"""A thread that asks a cloud every few seconds, for a monitor that must not wait for a metadata service."""

from __future__ import annotations

import threading
from collections.abc import Callable

from resilience_sdk.preemption.cloud import CloudPoller
from resilience_sdk.preemption.cloud_http import Notice

EVERY_S = 5.0  # what Amazon advises; a spot machine of Google's has 30 s


class CloudWatch:
    """Asks `poller` every `every_s` seconds, at once at first. `notice` may be read by any thread."""

    def __init__(
        self, poller: CloudPoller, *, every_s: float = EVERY_S, on_notice: Callable[[Notice], None] | None = None
    ) -> None:
        """Start the thread. `on_notice` is called in it, with each notice that differs from the last one."""
        self.notice: Notice | None = None
        self._poller = poller
        self._every_s = every_s
        self._on_notice = on_notice
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resilience-cloud", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop asking; waits up to `timeout_s` for a question that is on."""
        self._over.set()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._over.is_set():
            notice = self._poller.poll()
            # A notice that is taken back (a recommendation, maintenance that was put off) no longer stands.
            changed, self.notice = notice != self.notice, notice
            if notice is not None and changed and self._on_notice is not None:
                self._on_notice(notice)
            self._over.wait(self._every_s)
