"""Metadata services of three clouds on the loopback interface, speaking the documented protocols.

They refuse what the real ones refuse: a missing or wrong token (401), a missing time to live (400), a missing
`Metadata-Flavor` (403), a missing `Metadata` (400), and requests that came through a proxy (`X-Forwarded-For`).
"""

from __future__ import annotations

import json
import secrets
import threading
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


class Ec2(Service):
    """IMDSv2 with tokens required."""

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
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
    """The metadata server of Compute Engine; its two keys are always there."""

    def __init__(self) -> None:
        super().__init__()
        self.documents = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in headers:
            return 403, "Missing Metadata-Flavor:Google header."
        name = path.removeprefix("/computeMetadata/v1/instance/")
        return (200, self.documents[name]) if method == "GET" and name in self.documents else (404, "")


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
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = _serve  # noqa: N815

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
