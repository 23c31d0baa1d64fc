"""Notices of the clouds that this machine is about to be taken away, asked for at their metadata services.

Off unless asked for. A poller is asked by the monitor, never by a training thread: a question may take as long as its
time limit. Whatever goes wrong is said once and counts as "no notice".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from resilience_sdk.clock import NS_PER_S, Clock, SystemClock
from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.preemption.cloud_aws import AwsPoller
from resilience_sdk.preemption.cloud_azure import AzurePoller
from resilience_sdk.preemption.cloud_gcp import GcpPoller
from resilience_sdk.preemption.cloud_http import MetadataError, MetadataService, Notice
from resilience_sdk.settings.parse import base_url

__all__ = ["CLOUDS", "DEFAULT_ENDPOINT", "CloudPoller", "Notice", "cloud_poller"]

# Link-local and the same for all three; a name would need a resolver that may be the thing that is gone.
DEFAULT_ENDPOINT = "http://169.254.169.254"
TIMEOUT_S = 2.0
# Azure switches its events on at the first question, and may not answer any in the two minutes that this takes.
_SILENT_AT_FIRST_S = {"azure": 150.0}


class _Asks(Protocol):
    """One cloud's protocol: raises `MetadataError` where its service does not answer as documented."""

    def poll(self) -> Notice | None: ...


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
    _last: Notice | None = None

    def poll(self) -> Notice | None:
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
