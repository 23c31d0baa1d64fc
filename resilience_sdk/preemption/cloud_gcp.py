"""Google Compute Engine: preemption of spot machines, and maintenance that ends the machine.

`preempted` becomes TRUE 30 s before the machine is gone; `maintenance-event` tells of host maintenance, a minute ahead
and for machines with accelerators an hour. A live migration (`MIGRATE_ON_HOST_MAINTENANCE`) ends nothing.

Of half a minute every second counts, so the service is asked to answer as soon as `preempted` is not what it was
(`wait_for_change`, with the `ETag` of the last answer, so that no change falls between two questions).
"""

from __future__ import annotations

import urllib.parse

import attrs

from resilience_sdk.clock import Clock
from resilience_sdk.preemption.cloud_http import Answer, MetadataService, Notice

PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
NOTICE_S = 30.0
WAIT_S = 5
_HEADERS = {"Metadata-Flavor": "Google"}


@attrs.define
class GcpPoller:
    """Asks the metadata service of Compute Engine. One thread at a time."""

    _service: MetadataService
    _clock: Clock
    _preempted_at: float | None = None
    _etag: str = ""

    def poll(self) -> Notice | None:
        """Return the notice that stands; raises MetadataError."""
        if self._is_preempted():
            # The service tells no time: the end is counted from when it was first seen.
            self._preempted_at = self._clock.wall_s() if self._preempted_at is None else self._preempted_at
            return Notice("gcp preempted", "the machine is preempted", self._preempted_at + NOTICE_S)
        event = self._ask(MAINTENANCE).body
        if event.upper().startswith("TERMINATE"):
            return Notice("gcp maintenance", f"host maintenance ends the machine ({event})", None)
        return None

    def _is_preempted(self) -> bool:
        """Tell what the service says, after up to `WAIT_S` seconds if it says what it said before."""
        if not self._etag:
            answer = self._ask(PREEMPTED)
        else:
            query = {"wait_for_change": "true", "timeout_sec": WAIT_S, "last_etag": self._etag}
            answer = self._ask(f"{PREEMPTED}?{urllib.parse.urlencode(query)}", WAIT_S)
        self._etag = answer.etag
        return answer.body.upper() == "TRUE"

    def _ask(self, path: str, wait_s: float = 0.0) -> Answer:
        answer = self._service.ask(path, headers=_HEADERS, wait_s=wait_s)
        if answer.status != 200:
            self._etag = ""
            raise self._service.refused(path, answer)
        return answer
