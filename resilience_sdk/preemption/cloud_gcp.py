"""Google Compute Engine: preemption of spot machines, and maintenance that ends the machine.

`preempted` becomes TRUE 30 s before the machine is gone; `maintenance-event` tells of host maintenance, a minute ahead
and for machines with accelerators an hour. A live migration (`MIGRATE_ON_HOST_MAINTENANCE`) ends nothing.
"""

from __future__ import annotations

import attrs

from resilience_sdk.clock import Clock
from resilience_sdk.preemption.cloud_http import MetadataService, Notice

PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
NOTICE_S = 30.0
_HEADERS = {"Metadata-Flavor": "Google"}


@attrs.define
class GcpPoller:
    """Asks the metadata service of Compute Engine. One thread at a time."""

    _service: MetadataService
    _clock: Clock
    _preempted_at: float | None = None

    def poll(self) -> Notice | None:
        """Return the notice that stands; raises MetadataError."""
        if self._ask(PREEMPTED).upper() == "TRUE":
            # The service tells no time: the end is counted from when it was first seen.
            self._preempted_at = self._clock.wall_s() if self._preempted_at is None else self._preempted_at
            return Notice("gcp preempted", "the machine is preempted", self._preempted_at + NOTICE_S)
        event = self._ask(MAINTENANCE)
        if event.upper().startswith("TERMINATE"):
            return Notice("gcp maintenance", f"host maintenance ends the machine ({event})", None)
        return None

    def _ask(self, path: str) -> str:
        answer = self._service.ask(path, headers=_HEADERS)
        if answer.status != 200:
            raise self._service.refused(path, answer)
        return answer.body
