"""One request to a metadata service: short, direct, bounded."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.console import printable

_MOST_BYTES = 1 << 18
_MOST_WORDS = 200


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())[:_MOST_WORDS]  # it repeats what the other side sent


class MetadataError(Exception):
    """The service cannot be asked, or answers otherwise than documented; the text says how."""


@attrs.frozen
class Notice:
    """This machine, or this process, is about to be taken away. Source and reason together name it in the journal."""

    source: str
    """Who told: `aws spot`, `aws rebalance`, `gcp preempted`, `gcp maintenance`, `azure preempt`, ..."""
    reason: str = attrs.field(converter=_one_line)
    """What was told, in words: with the cloud's own id or time of it, so that two notices differ."""
    deadline_unix: float | None
    """When it happens, in Unix seconds; None where nobody told."""

    def names_another(self, other: Notice) -> bool:
        """Tell whether `other` is not this one, be its end put off."""
        return (self.source, self.reason) != (other.source, other.reason)


@attrs.frozen
class Answer:
    """What the service said, whatever its status."""

    status: int
    body: str
    etag: str = ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A metadata service does not redirect; whoever does is none, and gets no token."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


@attrs.frozen
class MetadataService:
    """The service at `base` (no slash at the end). `timeout_s` limits each step of a request."""

    base: str
    timeout_s: float

    def ask(self, path: str, *, headers: Mapping[str, str], method: str = "GET", wait_s: float = 0.0) -> Answer:
        """Return the answer of the service, never through a proxy; `wait_s` more for one that was asked to wait.

        Raises:
            MetadataError: Nobody answers.
        """
        request = urllib.request.Request(  # noqa: S310 - http and https only, see `settings.parse.base_url`
            self.base + path, method=method, headers=dict(headers)
        )
        # A proxy of the environment would ask about itself. Made anew, because the monitor asks every few seconds only.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
        try:
            with opener.open(request, timeout=self.timeout_s + wait_s) as response:
                return Answer(response.status, _text(response), response.headers.get("ETag", ""))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise MetadataError(f"{self.base} does not answer ({_one_line(str(reason))})") from None

    def refused(self, path: str, answer: Answer) -> MetadataError:
        """Return the error for a status that is not part of the protocol."""
        return MetadataError(f"{self.base}{path} answers with {answer.status}")


def _text(response: http.client.HTTPResponse) -> str:
    return response.read(_MOST_BYTES).decode("utf-8", "replace").strip()
