"""Amazon EC2: spot interruptions and rebalance recommendations, by version 2 of the metadata service.

Every question carries a token that a PUT gives for a limited time. 404 means: nothing of the kind. Two minutes before
a spot instance is taken away `spot/instance-action` says when; a rebalance recommendation may come earlier, without a
time.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import attrs

from resilience_sdk.clock import NS_PER_S, Clock
from resilience_sdk.preemption.cloud_http import Answer, MetadataError, MetadataService, Notice

TOKEN = "/latest/api/token"  # noqa: S105 - a path
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_S = 21600  # the most that is allowed
_RENEW_BEFORE_S = 60


@attrs.define
class AwsPoller:
    """Asks the metadata service of EC2. One thread at a time."""

    _service: MetadataService
    _clock: Clock
    _token: str | None = None
    _token_until_ns: int = 0

    def poll(self) -> Notice | None:
        """Return the notice that stands, the interruption first; raises MetadataError."""
        action = self._ask(ACTION)
        if action is not None:
            # Without readable details it is a notice all the same.
            when = action.get("time")
            words = f"spot instance: {action.get('action', 'interruption')}" + (f" at {when}" if when else "")
            return Notice("aws spot", words, _unix(when))
        advice = self._ask(REBALANCE)
        if advice is not None:
            when = advice.get("noticeTime")
            words = "rebalance recommendation" + (f" of {when}" if when else "") + ": an interruption is likely"
            return Notice("aws rebalance", words, None)
        return None

    def _ask(self, path: str) -> dict[str, Any] | None:
        """Return the document at `path`, None where there is none."""
        answer = self._with_token(path)
        if answer.status == 401:
            # The token was given by another service (a restored snapshot), or has expired early.
            self._token = None
            answer = self._with_token(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise self._service.refused(path, answer)
        try:
            document = json.loads(answer.body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            # Some networks answer every question with a page of their own.
            raise MetadataError(f"{self._service.base}{path} answers with something that is no JSON object")
        return document

    def _with_token(self, path: str) -> Answer:
        return self._service.ask(path, headers={"X-aws-ec2-metadata-token": self._fresh_token()})

    def _fresh_token(self) -> str:
        now = self._clock.monotonic_ns()
        if self._token is None or now >= self._token_until_ns:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            try:
                answer = self._service.ask(TOKEN, headers=headers, method="PUT")
            except MetadataError as error:
                # The answer to this PUT dies on its way through one router more than the machine allows.
                raise MetadataError(f"{error}; in a container, HttpPutResponseHopLimit has to be 2") from None
            # What cannot stand in a header is no token.
            if answer.status != 200 or not answer.body.isascii() or not answer.body.isprintable() or not answer.body:
                raise self._service.refused(TOKEN, answer)
            self._token = answer.body
            self._token_until_ns = now + (TOKEN_S - _RENEW_BEFORE_S) * NS_PER_S
        return self._token


def _unix(text: object) -> float | None:
    """Return Unix seconds for a time such as `2024-05-17T08:22:00Z`."""
    try:
        at = datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)).timestamp()
