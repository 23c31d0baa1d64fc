"""Notices of the clouds that this machine is about to be taken away, asked for at their metadata services.

Clouds list maintenance for as long as it lies ahead, up to hours. A job that saved and stopped for it, and was started
on the same machine all the same, would be stopped again at once, for ever. So one notice stops the jobs of one run
directory on one machine when it comes, and once more when a save just fits before its end.

Every question carries a token that a PUT gives for a limited time. 404 means: nothing of the kind. Two minutes before
a spot instance is taken away `spot/instance-action` says when; a rebalance recommendation may come earlier, without a
time.

The document lists the events of every machine of an availability or scale set, so the machine's own name is asked for
first. An event has started when its `NotBefore` is empty.

Events are only read. Approving one (a POST of `StartRequests`) makes Azure take the machine at once, and every other
machine that the event names: that is the operator's to decide, not ours.

`preempted` becomes TRUE 30 s before the machine is gone; `maintenance-event` tells of host maintenance, a minute ahead
and for machines with accelerators an hour. A live migration (`MIGRATE_ON_HOST_MAINTENANCE`) ends nothing.

Of half a minute every second counts, so the service is asked to answer as soon as `preempted` is not what it was
(`wait_for_change`, with the `ETag` of the last answer, so that no change falls between two questions).

Off unless asked for. A poller is asked by the monitor, never by a training thread: a question may take as long as its
time limit. Whatever goes wrong is said once and counts as "no notice".
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk.core.clock import NS_PER_S, Clock, SystemClock
from resilience_sdk.core.console import printable, say_once
from resilience_sdk.core.journal import CURVES, Event, read_journal
from resilience_sdk.core.settings.parse import base_url
from resilience_sdk.errors import ConfigError
from resilience_sdk.system.hostinfo import boot_id

_MOST_BYTES = 1 << 18
_MOST_WORDS = 200


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())[:_MOST_WORDS]  # it repeats what the other side sent


class MetadataError(Exception):
    """The service cannot be asked, or answers otherwise than documented; the text says how."""


@attrs.frozen
class CloudNotice:
    """This machine, or this process, is about to be taken away. Source and reason together name it in the journal."""

    source: str
    """Who told: `aws spot`, `aws rebalance`, `gcp preempted`, `gcp maintenance`, `azure preempt`, ..."""
    reason: str = attrs.field(converter=_one_line)
    """What was told, in words: with the cloud's own id or time of it, so that two notices differ."""
    deadline_unix: float | None
    """When it happens, in Unix seconds; None where nobody told."""

    def names_another(self, other: CloudNotice) -> bool:
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


_START_S = 5.0  # a job that starts takes longer: less time than this is not worth a second stop


@attrs.frozen
class Heeded:
    """A start of the job that stopped for a notice. Times are Unix seconds of this machine."""

    at: float
    end: float
    """When the ranks would have been ended, as far as it was known at `at`."""


def still_stands(notice: CloudNotice, heeded: Sequence[Heeded], now: float, lead_s: float) -> bool:
    """Tell whether `notice` stops the job that runs at `now` (Unix seconds). `lead_s`: seconds that a save needs."""
    if not heeded:
        return True
    ends = [one.end for one in heeded] + ([] if notice.deadline_unix is None else [notice.deadline_unix])
    last_call = min(ends) - lead_s
    return now >= last_call and all(last_call - one.at > _START_S for one in heeded)


def heeded_before(events: Iterable[Mapping[str, Any]], notice: CloudNotice, boot_id: str) -> list[Heeded]:
    """Return which starts have stopped for `notice` on the machine with this boot id, from the journal's events.

    One that was told and whose ranks agreed on no stop (they crashed first) does not count.
    """
    here = [event for event in events if event.get("boot_id") == boot_id]
    stops = [event["t"] for event in here if event["event"] == Event.STOP_AGREED.value]
    last_stop = max(stops, default=float("-inf"))
    return [
        Heeded(event["t"], event["t"] + float(event.get("time_left_s") or 0.0))
        for event in here
        if event["event"] == Event.PREEMPT_NOTICE.value
        and (event.get("source"), event.get("reason")) == (notice.source, notice.reason)
        and event["t"] <= last_stop
    ]


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

    def poll(self) -> CloudNotice | None:
        """Return the notice that stands, the interruption first; raises MetadataError."""
        action = self._ask(ACTION)
        if action is not None:
            # Without readable details it is a notice all the same.
            when = action.get("time")
            words = f"spot instance: {action.get('action', 'interruption')}" + (f" at {when}" if when else "")
            return CloudNotice("aws spot", words, _unix(when))
        advice = self._ask(REBALANCE)
        if advice is not None:
            when = advice.get("noticeTime")
            words = "rebalance recommendation" + (f" of {when}" if when else "") + ": an interruption is likely"
            return CloudNotice("aws rebalance", words, None)
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


EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
# Freeze (a pause of seconds) and live migrations leave the job alone; Redeploy starts the machine elsewhere.
ENDING = frozenset({"preempt", "terminate", "reboot", "redeploy"})
_AZURE_HEADERS = {"Metadata": "true"}


@attrs.define
class AzurePoller:
    """Asks the metadata service of Azure. One thread at a time."""

    _service: MetadataService
    _clock: Clock
    _name: str | None = None

    def poll(self) -> CloudNotice | None:
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

    def _notice(self, event: Mapping[str, Any]) -> CloudNotice:
        kind = str(event["EventType"])
        started = event.get("EventStatus") == "Started" or not event.get("NotBefore")
        at = self._clock.wall_s() if started else _unix_of_http_date(event.get("NotBefore"))
        description = event.get("Description")
        words = f"scheduled event {kind} {event.get('EventId', '')}"
        words += f": {description}" if isinstance(description, str) and description else ""
        return CloudNotice(f"azure {kind.lower()}", words, at)

    def _ask(self, path: str) -> str:
        answer = self._service.ask(path, headers=_AZURE_HEADERS)
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


def _unix_of_http_date(text: object) -> float | None:
    """Return Unix seconds for a time such as `Mon, 19 Sep 2016 18:29:47 GMT`."""
    try:
        return email.utils.parsedate_to_datetime(str(text)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
NOTICE_S = 30.0
WAIT_S = 5
_GCP_HEADERS = {"Metadata-Flavor": "Google"}


@attrs.define
class GcpPoller:
    """Asks the metadata service of Compute Engine. One thread at a time."""

    _service: MetadataService
    _clock: Clock
    _preempted_at: float | None = None
    _etag: str = ""

    def poll(self) -> CloudNotice | None:
        """Return the notice that stands; raises MetadataError."""
        if self._is_preempted():
            # The service tells no time: the end is counted from when it was first seen.
            self._preempted_at = self._clock.wall_s() if self._preempted_at is None else self._preempted_at
            return CloudNotice("gcp preempted", "the machine is preempted", self._preempted_at + NOTICE_S)
        event = self._ask(MAINTENANCE).body
        if event.upper().startswith("TERMINATE"):
            return CloudNotice("gcp maintenance", f"host maintenance ends the machine ({event})", None)
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
        answer = self._service.ask(path, headers=_GCP_HEADERS, wait_s=wait_s)
        if answer.status != 200:
            self._etag = ""
            raise self._service.refused(path, answer)
        return answer


# Link-local and the same for all three; a name would need a resolver that may be the thing that is gone.
DEFAULT_ENDPOINT = "http://169.254.169.254"
TIMEOUT_S = 2.0
# Azure switches its events on at the first question, and may not answer any in the two minutes that this takes.
_SILENT_AT_FIRST_S = {"azure": 150.0}


class _Asks(Protocol):
    """One cloud's protocol: raises `MetadataError` where its service does not answer as documented."""

    def poll(self) -> CloudNotice | None: ...


_POLLERS: dict[str, Callable[[MetadataService, Clock], _Asks]] = {
    "aws": AwsPoller,
    "gcp": GcpPoller,
    "azure": AzurePoller,
}
CLOUDS = ("off", *_POLLERS)


@attrs.define
class CloudPoller:
    """Asks one cloud. One thread at a time."""

    cloud: str
    endpoint: str
    _asks: _Asks
    _clock: Clock
    _first_ns: int | None = None
    _last: CloudNotice | None = None

    def poll(self) -> CloudNotice | None:
        """Return the notice that stands, or None. Takes up to a few times `timeout_s`; never raises.

        A service that cannot be asked is said once: on a machine of another cloud nobody answers. What it said last
        then stands, since a network that breaks down takes no notice back.
        """
        now = self._clock.monotonic_ns()
        self._first_ns = now if self._first_ns is None else self._first_ns
        try:
            self._last = self._asks.poll()
        except MetadataError as error:
            if now - self._first_ns >= _SILENT_AT_FIRST_S.get(self.cloud, 0.0) * NS_PER_S:
                say_once(
                    f"cloud:{self.cloud}:{self.endpoint}",
                    f"cloud_notices {self.cloud}: {error}; notices are not seen while this lasts (--cloud-notices off "
                    "stops asking)",
                )
        except Exception as error:  # noqa: BLE001 - whatever a foreign service sends must not end the monitor
            say_once(
                f"cloud:{self.cloud}:{self.endpoint}:odd",
                f"cloud_notices {self.cloud}: {self.endpoint} sent what cannot be understood "
                f"({type(error).__name__}: {error})",
            )
        return self._last


def cloud_poller(
    cloud: str, endpoint: str | None = None, *, timeout_s: float = TIMEOUT_S, clock: Clock | None = None
) -> CloudPoller | None:
    """Return the poller of `cloud` (`aws`, `gcp` or `azure`), or None for `off`.

    Args:
        cloud: The setting `cloud_notices`.
        endpoint: The setting `cloud_endpoint`, such as `http://127.0.0.1:8080`; without it the cloud's own.
        timeout_s: Time limit of one request, in seconds.
        clock: For the age of tokens and the end of notices that come without a time.

    Raises:
        ConfigError: Another cloud, or an endpoint that is no URL.
    """
    if cloud == "off":
        return None
    if cloud not in _POLLERS:
        raise ConfigError(f"cloud_notices: expected one of {', '.join(CLOUDS)}, not {cloud!r}")
    try:
        url = base_url(endpoint) or DEFAULT_ENDPOINT
    except ValueError as error:
        raise ConfigError(f"cloud_endpoint: {error}, not {endpoint!r}") from None
    service = MetadataService(url, timeout_s)
    clock = clock or SystemClock()
    return CloudPoller(cloud, url, _POLLERS[cloud](service, clock), clock)


EVERY_S = 5.0  # what Amazon advises; Google's service is asked to answer as soon as something changes


class CloudWatch:
    """The notice that a job has to obey now. One thread asks for it; the questions go on in short threads.

    A notice that a start of the job on this machine has obeyed does not stop the next start at once: see
    `still_stands`.
    """

    def __init__(
        self,
        poller: CloudPoller,
        journal: Path,
        *,
        lead_s: float,
        every_s: float = EVERY_S,
        clock: Clock | None = None,
    ) -> None:
        """Ask `poller` every `every_s` seconds.

        Args:
            poller: Asked in a thread of its own, one question at a time.
            journal: Tells who has obeyed a notice before; it is read once per notice and start.
            lead_s: How long a save may take, in seconds.
            every_s: From the beginning of one question to the next.
            clock: For the tests.
        """
        self._poller = poller
        self._journal = journal
        self._lead_s = lead_s
        self._every_s = every_s
        self._clock = clock or SystemClock()
        self._thread: threading.Thread | None = None
        self._asked_ns = 0
        self._notice: CloudNotice | None = None
        self._known: tuple[CloudNotice, Sequence[Heeded]] | None = None

    def notice(self) -> CloudNotice | None:
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
            events = read_journal(self._journal, without=CURVES).events
            self._known = notice, heeded_before(events, notice, boot_id())
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
