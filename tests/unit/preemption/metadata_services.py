"""Metadata services of three clouds on the loopback interface, speaking the documented protocols.

They refuse what the real ones refuse: a missing or wrong token (401), a missing time to live (400), a missing
`Metadata-Flavor` (403), a missing `Metadata` (400), and requests that came through a proxy (`X-Forwarded-For`).
Google's waits for a change when it is asked to, and Azure's lets an event begin as soon as it is approved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """What a service answers, to be changed by a test; `asked` is every request line with its status."""

    def __init__(self) -> None:
        self.documents: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.asked: list[tuple[str, str, int]] = []
        self.raw: bytes | None = None  # sent instead of everything
        self.url = ""

    def expire_tokens(self) -> None:
        self.tokens.clear()

    def paths(self, path: str) -> list[int]:
        return [status for _, asked, status in self.asked if asked == path]

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        raise NotImplementedError

    def etag(self, path: str) -> str:
        return ""


class Ec2(Service):
    """IMDSv2 with tokens required; `refuse` is a status for everything (403: the service is switched off)."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: int | None = None

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if self.refuse is not None:
            return self.refuse, ""
        if "X-Forwarded-For" in headers:
            return 403, ""
        if path == "/latest/api/token":
            if method != "PUT":
                return 405, ""
            ttl = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return 400, ""
            self.tokens.add(token := secrets.token_urlsafe(32))
            return 200, token
        if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, ""
        return (200, self.documents[path]) if path in self.documents else (404, "Not Found")


class Gce(Service):
    """The metadata server of Compute Engine; its two keys are always there, each with an `ETag`."""

    def __init__(self) -> None:
        super().__init__()
        self.documents = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.waiting = threading.Event()  # set once a question has waited for a change

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in headers:
            return 403, "Missing Metadata-Flavor:Google header."
        url = urllib.parse.urlsplit(path)
        name = url.path.removeprefix("/computeMetadata/v1/instance/")
        if method != "GET" or name not in self.documents:
            return 404, ""
        query = dict(urllib.parse.parse_qsl(url.query))
        if query.get("wait_for_change") == "true":
            until = time.monotonic() + float(query.get("timeout_sec", "60"))
            last = query.get("last_etag", self.etag(path))
            while self.etag(path) == last and time.monotonic() < until:
                self.waiting.set()
                time.sleep(0.005)
        return 200, self.documents[name]

    def etag(self, path: str) -> str:
        name = urllib.parse.urlsplit(path).path.rpartition("/")[2]
        return hashlib.sha256(self.documents.get(name, "").encode()).hexdigest()[:16]


class Azure(Service):
    """Scheduled events and the name of the machine; other versions and callers without the header are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.name = "Trainer_3"

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        url = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if headers.get("Metadata") != "true" or "X-Forwarded-For" in headers:
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"})
        if url.path == "/metadata/scheduledevents" and query == {"api-version": "2020-07-01"}:
            if method == "POST":  # StartRequests: whoever asks so loses the machine now
                self.events = [{**event, "EventStatus": "Started", "NotBefore": ""} for event in self.events]
                return 200, ""
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        if url.path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, self.name
        return 404, ""


@contextmanager
def serving(service: Service) -> Iterator[Service]:
    """Serve on a free port of the loopback interface; `service.url` is the address."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            if service.raw is not None:
                self.wfile.write(service.raw)
                return
            status, body = service.answer(self.command, self.path, self.headers)
            service.asked.append((self.command, self.path, status))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            if status == 200 and (etag := service.etag(self.path)):
                self.send_header("ETag", etag)
            self.end_headers()
            with contextlib.suppress(OSError):  # who asked may be gone by now
                self.wfile.write(body.encode())

        do_GET = do_PUT = do_POST = _serve  # noqa: N815

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
