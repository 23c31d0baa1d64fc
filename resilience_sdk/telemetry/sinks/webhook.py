"""A webhook: each event that counts is posted as JSON, once it is known, until the receiver has it.

Its address comes from the settings alone, never from a run directory, and is not followed elsewhere.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from resilience_sdk.core.console import printable, say_once
from resilience_sdk.core.redaction import redact
from resilience_sdk.telemetry.metrics import clean_json
from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin
from resilience_sdk.telemetry.tail import Line

_TIMEOUT_S = 10.0
_REFUSED = (400, 413, 415, 422)  # of this one event: it would be refused for ever
# Of the receiver, which takes events again later: 408 and 429 are about time, the rest of 4xx about this event (a
# filter before the receiver) or the address (it was withdrawn), which only another event can tell.
_LATER = (408, 425, 429)
_MOST_WAITING = 100
_WAITING = "refused"  # in the sink's memory
_MOST_CHARACTERS = 2000
_SHOWN = ("kind", "cause", "verdict", "reason", "culprits", "what", "why", "text", "recovery_s", "lost_steps", "error")


class WebhookError(Exception):
    """The receiver did not take an event; the text says why, without the address."""


class Webhook(Sink):
    """Posts `{"text", "id", "run", "node", "event"}`: `text` is one line for people, and what Slack shows.

    An event whose answer was lost is posted again with the same `id`, also the header `Idempotency-Key`. One that the
    receiver refuses as it would a wrong address waits aside: once another event is taken, it is posted again, and
    passed over if it is refused again. So it holds up nobody, and nothing is lost while an address is wrong.
    """

    name = "webhook"

    def __init__(self, place: TelemetryOrigin, url: str, events: Collection[str]) -> None:
        """Post the events with these names to `url`."""
        super().__init__(place)
        self._url = url
        self._events = frozenset(events)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._tries = -1

    def digest(self, line: Line) -> Sequence[Mapping[str, Any]]:
        """Return what is to be posted of a line."""
        if line.event["event"] not in self._events:
            return ()
        event = clean_json(redact(dict(line.event)))
        run, node = self.place.run, self.place.host
        return ({"text": _sentence(run, node, event), "id": line.id, "run": run, "node": node, "event": event},)

    def send(self, items: deque[Mapping[str, Any]]) -> None:
        """Post one after the other; raises WebhookError for the first that has to be posted later."""
        while items:
            if len(self._waiting) >= _MOST_WAITING:
                self._try_waiting()  # so many, and none taken: it is the address, and the journal keeps the rest
            status = self._post(items[0])
            if status is None or status in _REFUSED:
                item = items.popleft()
                if status is None:
                    self._judge_waiting()
                else:
                    _pass_over(item, status)
            else:
                self._waiting = [*self._waiting, items[0]]
                items.popleft()

    def refresh(self) -> None:
        """Post one of those that wait; raises WebhookError when it is refused again."""
        if self._waiting:
            self._try_waiting()

    @property
    def _waiting(self) -> list[Mapping[str, Any]]:
        return list(self.memory.get(_WAITING, ()))

    @_waiting.setter
    def _waiting(self, items: list[Mapping[str, Any]]) -> None:
        self.memory[_WAITING] = items  # another list, as what was remembered is compared with what is

    def _try_waiting(self) -> None:
        """Post another one of those that wait each time: the first may be refused for what it is."""
        waiting = self._waiting
        self._tries += 1
        item = waiting[self._tries % len(waiting)]
        status = self._post(item)
        if status is not None and status not in _REFUSED:
            raise WebhookError(f"the receiver answered with status {status}")
        waiting.remove(item)
        self._waiting = waiting
        if status is None:
            self._judge_waiting()
        else:
            _pass_over(item, status)

    def _judge_waiting(self) -> None:
        """Post all that wait again, now that the receiver takes events; pass over what it still refuses."""
        while self._waiting:
            item, *rest = self._waiting
            status = self._post(item)
            self._waiting = rest
            if status is not None:
                _pass_over(item, status)

    def _post(self, item: Mapping[str, Any]) -> int | None:
        """Return None when it was taken, or the status with which it was refused; raises WebhookError for others."""
        request = urllib.request.Request(  # noqa: S310 - http and https only, see `settings.parse.web_address`
            self._url,
            data=json.dumps(item).encode(),
            headers={"Content-Type": "application/json", "Idempotency-Key": str(item["id"])},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                status = error.code
        except (http.client.HTTPException, UnicodeError) as error:  # their texts may quote the address
            raise WebhookError(f"the receiver cannot be asked ({type(error).__name__})") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise WebhookError(f"the receiver cannot be reached ({reason})") from None
        if 400 <= status < 500 and status not in _LATER:
            return status
        raise WebhookError(f"the receiver answered with status {status}")


def _pass_over(item: Mapping[str, Any], status: int) -> None:
    name = item["event"]["event"]
    say_once(f"webhook:{name}", f"the webhook refuses events {name} (status {status}): they are passed over")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Who may post where is for the settings to say."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _sentence(run: str, node: str, event: Mapping[str, Any]) -> str:
    """Return an event as one line."""
    facts = "; ".join(f"{key} {event[key]}" for key in _SHOWN if event.get(key) not in (None, "", []))
    where = f"attempt {event.get('attempt')}" + (f", step {event['step']}" if event.get("step") is not None else "")
    text = f"{run} on {node}: {event['event']} ({where})" + (f": {facts}" if facts else "")
    return printable(" ".join(text.split()))[:_MOST_CHARACTERS]
