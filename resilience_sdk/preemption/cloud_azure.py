"""Azure: scheduled events that end or restart this machine.

The document lists the events of every machine of an availability or scale set, so the machine's own name is asked for
first. An event has started when its `NotBefore` is empty.

Events are only read. Approving one (a POST of `StartRequests`) makes Azure take the machine at once, and every other
machine that the event names: that is the operator's to decide, not ours.
"""

from __future__ import annotations

import email.utils
import json
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.clock import Clock
from resilience_sdk.preemption.cloud_http import MetadataError, MetadataService, Notice

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
# Freeze (a pause of seconds) and live migrations leave the job alone; Redeploy starts the machine elsewhere.
ENDING = frozenset({"preempt", "terminate", "reboot", "redeploy"})
_HEADERS = {"Metadata": "true"}


@attrs.define
class AzurePoller:
    """Asks the metadata service of Azure. One thread at a time."""

    _service: MetadataService
    _clock: Clock
    _name: str | None = None

    def poll(self) -> Notice | None:
        """Return the first notice for this machine, by time; raises MetadataError."""
        document = self._ask(EVENTS)
        try:
            events = json.loads(document).get("Events", [])
        except (ValueError, AttributeError, RecursionError):
            raise MetadataError(f"{self._service.base}{EVENTS} answers with something that is no JSON object") from None
        ending = [event for event in events if isinstance(event, Mapping) and _ends(event)]
        if not ending:
            return None
        if self._name is None:
            self._name = self._ask(NAME)
        mine = [event for event in ending if self._name.lower() in _resources(event)]
        notices = [self._notice(event) for event in mine]
        return min(notices, key=lambda notice: notice.deadline_unix or 0.0, default=None)

    def _notice(self, event: Mapping[str, Any]) -> Notice:
        kind = str(event["EventType"])
        started = event.get("EventStatus") == "Started" or not event.get("NotBefore")
        at = self._clock.wall_s() if started else _unix(event.get("NotBefore"))
        description = event.get("Description")
        words = f"scheduled event {kind} {event.get('EventId', '')}"
        words += f": {description}" if isinstance(description, str) and description else ""
        return Notice(f"azure {kind.lower()}", words, at)

    def _ask(self, path: str) -> str:
        answer = self._service.ask(path, headers=_HEADERS)
        if answer.status != 200:
            raise self._service.refused(path, answer)
        return answer.body


def _ends(event: Mapping[str, Any]) -> bool:
    """Tell whether an event ends the machine, and still lies ahead or happens now."""
    return str(event.get("EventType", "")).lower() in ENDING


def _resources(event: Mapping[str, Any]) -> set[str]:
    named = event.get("Resources")
    # Members of scale sets are also written as paths of resources.
    return {str(name).rpartition("/")[2].lower() for name in named} if isinstance(named, list) else set()


def _unix(text: object) -> float | None:
    """Return Unix seconds for a time such as `Mon, 19 Sep 2016 18:29:47 GMT`."""
    try:
        return email.utils.parsedate_to_datetime(str(text)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
