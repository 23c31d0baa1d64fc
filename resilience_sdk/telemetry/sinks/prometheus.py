"""Prometheus.

An endpoint that it scrapes, who has scraped it, and a file for the node exporter's textfile collector.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import os
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.core.port_holder import words_of_holder
from resilience_sdk.telemetry.metrics import DURATION_BOUNDS_S, Durations, Family, Sample
from resilience_sdk.telemetry.sinks.base import Metrics, Sink, TelemetryOrigin, load
from resilience_sdk.telemetry.tail import Line

LONGEST_STAY_S = 75.0
_UNKNOWN_INTERVAL_S = 60.0  # of one who came only once: Prometheus' own default
_LATE = 1.5  # scrapes are a little late now and then
_GONE_AFTER = 3.0  # intervals without a visit
_MOST = 64  # whose pods come and go with new addresses
_PAUSES = 4  # somebody else may have come in between, so the longest of them counts


@attrs.define
class _Visitor:
    last: float
    pauses: deque[float] = attrs.field(factory=lambda: deque(maxlen=_PAUSES))
    knows_the_end: bool = False

    @property
    def interval_s(self) -> float:
        return max(self.pauses, default=_UNKNOWN_INTERVAL_S)


class Visitors:
    """Those who come from one address count as one. Thread-safe."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._changed = threading.Condition()
        self._known: dict[str, _Visitor] = {}
        self._is_over = False
        self._here = threading.local()

    @contextlib.contextmanager
    def visit(self, address: str) -> Iterator[None]:
        """Serve a request from `address` on this thread in the block."""
        self._here.address, self._here.got_the_end = address, False
        try:
            yield
        finally:
            if self._here.got_the_end:  # only now is it written
                with self._changed:
                    if (visitor := self._known.get(address)) is not None:
                        visitor.knows_the_end = True
                    self._changed.notify_all()

    def note_request(self) -> None:
        """Take into account that the request of this thread is given the metrics of now, if it is one."""
        address = getattr(self._here, "address", None)
        if address is None:
            return
        now = time.monotonic()
        with self._changed:
            self._here.got_the_end = self._is_over
            visitor = self._known.get(address)
            if visitor is None:
                if len(self._known) >= _MOST:
                    del self._known[min(self._known, key=lambda known: self._known[known].last)]
                self._known[address] = _Visitor(now)
            else:
                visitor.pauses.append(now - visitor.last)
                visitor.last = now

    def wait_for_all(self) -> None:
        """Wait until everybody who comes regularly has been given what is true now, or has stayed away."""
        began = time.monotonic()
        with self._changed:
            self._is_over = True
            while (until := self._awaited_until(began)) > (now := time.monotonic()):
                self._changed.wait(until - now)

    def _awaited_until(self, began: float) -> float:
        """Return until when somebody is still to come who came before; `began` when nobody is."""
        awaited = [
            began + min(LONGEST_STAY_S, _LATE * visitor.interval_s + 1.0)
            for visitor in self._known.values()
            if not visitor.knows_the_end and began - visitor.last <= _GONE_AFTER * visitor.interval_s
        ]
        return max(awaited, default=began)


_EXTRA = "prometheus"
_RUN_LABELS = ("run", "node")
_LOOK_S = 0.1  # how soon the end is noticed
_PORT_FREE_WITHIN_S = LONGEST_STAY_S + 5.0
_MOST_OF_A_NAME = 80  # a file name has 255 bytes
_SERVED_S = 10.0  # how long one request may take
ADDRESS_FILE = "prometheus.address"


class _Prometheus(Sink):
    """What both ways have in common: the metrics, and their translation."""

    def __init__(self, place: TelemetryOrigin) -> None:
        super().__init__(place)
        self._metrics = Metrics(place)
        self._lock = threading.Lock()  # scrapes come on threads of their own

    def digest(self, line: Line) -> tuple[()]:
        with self._lock:
            self._metrics.apply(line.event)
        return ()

    def note_torn(self, lines: int) -> None:
        with self._lock:
            self._metrics.tally.apply_torn(lines)

    def collect(self) -> Iterator[Any]:
        """Yield every family as prometheus_client wants it. Any thread."""
        with self._lock:
            samples = self._metrics.all()
            # A histogram is changed in place: translated while it stands still.
            families = list(translated(samples, (self.place.run, self.place.host)))
        return iter(families)

    def _registry(self) -> Any:
        client = load("prometheus_client", extra=_EXTRA)
        registry = client.CollectorRegistry()
        registry.register(self)
        return registry


class PrometheusServer(_Prometheus):
    """Serves the metrics over HTTP. With a token only to those who have it."""

    name = "prometheus"
    is_fetched = True

    def __init__(
        self,
        place: TelemetryOrigin,
        address: tuple[str, int],
        token: str | None,
        *,
        port_free_within_s: float = _PORT_FREE_WITHIN_S,
    ) -> None:
        """Serve at `address` (host and port; port 0: any that is free)."""
        super().__init__(place)
        self._port_free_within_s = port_free_within_s
        self._shown = ""
        self._address = address
        self._token = token
        self._server: _Server | None = None
        self._over = threading.Event()
        self._has_read_all = False
        self._is_serving = False
        self._visitors = Visitors()

    def collect(self) -> Iterator[Any]:
        """Yield every family, to somebody who may have them."""
        self._visitors.note_request()
        return super().collect()

    def stay_until_fetched(self) -> None:
        """Serve until everybody who scrapes has been told the end, for one interval of theirs."""
        self._visitors.wait_for_all()

    def open(self) -> None:
        """Bind; raises OSError where the address is taken, and nobody is about to leave it.

        Who asks is answered once the journal was read: counters that begin at 0 again would be a reset to Prometheus.
        """
        application = load("prometheus_client", extra=_EXTRA).make_wsgi_app(self._registry())
        self._server = self._bound()
        self._server.set_app(application if self._token is None else _guarded(application, self._token))
        host, port = self._server.server_address[:2]
        shown = self._shown = f"{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"
        with contextlib.suppress(OSError):  # a full disk is what the metrics are wanted for
            write_whole(self.place.state_dir / ADDRESS_FILE, shown)
        say(f"metrics of this node at http://{shown}/metrics")
        if self._has_read_all:
            self._serve(self._server)

    def refresh(self) -> None:
        """Serve from the first time on: all that stands in the journal was read by now."""
        self._has_read_all = True
        if self._server is not None and not self._is_serving:
            self._serve(self._server)

    def _serve(self, server: _Server) -> None:
        self._is_serving = True
        threading.Thread(
            target=server.serve_forever, args=(_LOOK_S,), name="resilience-prometheus", daemon=True
        ).start()

    def note_end(self) -> None:
        """Wait no longer for the port."""
        self._over.set()

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            if self._is_serving:  # or `shutdown` would wait for a loop that never began
                self._server.shutdown()
                self._is_serving = False
            self._server.server_close()
            self._server = None
            with contextlib.suppress(OSError):  # another exporter of this run may have written its own by now
                if read_text(file := self.place.state_dir / ADDRESS_FILE) == self._shown:
                    file.unlink()

    def _bound(self) -> _Server:
        """Bind; the run before may have its last metrics fetched still, and leaves the port when they were."""
        until = time.monotonic() + self._port_free_within_s
        while True:
            try:
                return _Server(self._address, self._visitors)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= until or self._over.is_set():
                    raise
            say_once(
                f"port {self._address}",
                f"metrics: port {self._address[1]} is taken, perhaps by a run that has just ended and waits for its "
                f"last scrape: tried for {self._port_free_within_s:.0f} s ({words_of_holder(self._address[1])})",
            )
            self._over.wait(_LOOK_S)


class PrometheusTextfile(_Prometheus):
    """Writes the metrics into a directory that a node exporter reads (`--collector.textfile.directory`)."""

    name = "prometheus-textfile"

    def __init__(self, place: TelemetryOrigin, directory: str) -> None:
        """Write into `directory`, one file per run and node: it stays after the end, with `resilience_run_up 0`."""
        super().__init__(place)
        # Nodes may share the directory: pods of one host, or one on a shared file system.
        which = hashlib.sha256(os.fsencode(f"{place.run_dir}\n{place.host}")).hexdigest()[:8]
        self.path = Path(directory) / f"resilience_{_safe(place.run)}_{_safe(place.host)}_{which}.prom"

    def refresh(self) -> None:
        """Replace the file, readable for all: the node exporter is another user. Raises OSError."""
        client = load("prometheus_client", extra=_EXTRA)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        client.write_to_textfile(str(self.path), self._registry())
        os.chmod(self.path, 0o644)


def _safe(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name[:_MOST_OF_A_NAME])


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """One thread per scrape; none of them is waited for."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], visitors: Visitors) -> None:
        self._visitors = visitors
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for our own name, as the base class does: it may take half a minute."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one request, on its own thread."""
        with self._visitors.visit(str(client_address[0])):
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went or was silent: the base class would print a stack on the job's screen."""


class _Handler(WSGIRequestHandler):
    timeout = _SERVED_S

    def log_message(self, *_: Any) -> None:
        """Say nothing: a scrape comes every few seconds."""


_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _guarded(application: _Application, token: str) -> _Application:
    expected = f"Bearer {token}".encode()

    def answer(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = str(request.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if hmac.compare_digest(given, expected):
            return application(request, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the metrics of this run are served with a token only (setting prometheus_token)\n"]

    return answer


def translated(samples: Iterable[Sample], run: tuple[str, str]) -> Iterator[Any]:
    """Yield prometheus_client's families of `samples`, which come family by family; `run` is run and node."""
    core = load("prometheus_client.core", extra=_EXTRA)
    for family, group in itertools.groupby(samples, key=lambda sample: sample.family):
        made = _empty(core, family)
        for sample in group:
            labels = [*run, *sample.labels]
            if isinstance(sample.value, Durations):
                made.add_metric(labels, buckets=_buckets(sample.value), sum_value=sample.value.sum_s)
            else:
                made.add_metric(labels, sample.value)
        yield made


def _empty(core: Any, family: Family) -> Any:
    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[family.kind](family.prometheus_name, family.about, labels=[*_RUN_LABELS, *family.labels])


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" if bound % 1 else f"{bound:.1f}" for bound in DURATION_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(durations.counts)), strict=True))
