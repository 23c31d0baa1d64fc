"""Asks a cloud every few seconds, for a monitor that must not wait for a metadata service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from resilience_sdk.clock import NS_PER_S, Clock, SystemClock
from resilience_sdk.console import say_once
from resilience_sdk.preemption.cloud import CloudPoller
from resilience_sdk.preemption.cloud_http import Notice
from resilience_sdk.preemption.standing import Heeded, still_stands

EVERY_S = 5.0  # what Amazon advises; Google's service is asked to answer as soon as something changes


class CloudWatch:
    """The notice that a job has to obey now. One thread asks for it; the questions go on in short threads.

    A notice that a start of the job on this machine has obeyed does not stop the next start at once: see `standing`.
    """

    def __init__(
        self,
        poller: CloudPoller,
        heeded: Callable[[Notice], Sequence[Heeded]],
        *,
        lead_s: float,
        every_s: float = EVERY_S,
        clock: Clock | None = None,
    ) -> None:
        """Ask `poller` every `every_s` seconds.

        Args:
            poller: Asked in a thread of its own, one question at a time.
            heeded: Tells who has obeyed a notice before; may read files, and is called once per notice and start.
            lead_s: How long a save may take, in seconds.
            every_s: From the beginning of one question to the next.
            clock: For the tests.
        """
        self._poller = poller
        self._heeded = heeded
        self._lead_s = lead_s
        self._every_s = every_s
        self._clock = clock or SystemClock()
        self._thread: threading.Thread | None = None
        self._asked_ns = 0
        self._notice: Notice | None = None
        self._known: tuple[Notice, Sequence[Heeded]] | None = None

    def notice(self) -> Notice | None:
        """Return the notice to be obeyed, None = there is none; begin the next question when it is time. Never waits.

        Whoever was told a notice and asks again has been stopped by it, and has started again.
        """
        now_ns = self._clock.monotonic_ns()
        if self._thread is None or (
            not self._thread.is_alive() and now_ns - self._asked_ns >= self._every_s * NS_PER_S
        ):
            self._asked_ns = now_ns
            self._thread = threading.Thread(target=self._ask, name="resilience-cloud", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be had now: in five seconds, then
                self._thread.start()
        notice = self._notice
        if notice is None:
            return None
        if self._known is None or self._known[0].names_another(notice):
            self._known = notice, self._heeded(notice)
        if not still_stands(notice, self._known[1], self._clock.wall_s(), self._lead_s):
            say_once(
                f"heeded:{notice.source}:{notice.reason}",
                f"{notice.source}: {notice.reason}: an earlier start has stopped for this; training goes on",
            )
            return None
        self._known = None
        return notice

    def _ask(self) -> None:
        # A notice that is taken back (a recommendation, maintenance that was put off) no longer stands.
        self._notice = self._poller.poll()
