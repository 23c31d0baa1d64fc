"""A web server that receives what telemetry sends: a webhook's receiver, or an OpenTelemetry collector."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import attrs


@attrs.frozen
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Keeps what was posted; `answer` decides the status of each request."""

    def __init__(self, answer: Callable[[Received], int] = lambda _: 200) -> None:
        self.answer = answer
        self.all: list[Received] = []
        self.taken: list[Received] = []
        self.changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Received(self.path, headers, body)
                status = receiver.answer(request)
                with receiver.changed:
                    receiver.all.append(request)
                    if status == 200:
                        receiver.taken.append(request)
                    receiver.changed.notify_all()
                self.send_response(status)
                if status in (301, 302, 307, 308):
                    self.send_header("Location", f"{receiver.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def wait_for(self, enough: Callable[[list[Received]], object], timeout_s: float = 30) -> list[Received]:
        """Wait until what was taken is enough, and return it."""
        return self._wait_for(self.taken, enough, timeout_s)

    def wait_for_all(self, enough: Callable[[list[Received]], object], timeout_s: float = 30) -> list[Received]:
        """Wait until what was asked, taken or not, is enough, and return it."""
        return self._wait_for(self.all, enough, timeout_s)

    def _wait_for(
        self, requests: list[Received], enough: Callable[[list[Received]], object], timeout_s: float
    ) -> list[Received]:
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not enough(requests):
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"not received: {[(request.path, request.body[:300]) for request in self.all]}"
                self.changed.wait(left_s)
            return list(requests)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def receiving(answer: Callable[[Received], int] = lambda _: 200) -> Iterator[Receiver]:
    """Receive until the end of the block."""
    receiver = Receiver(answer)
    try:
        yield receiver
    finally:
        receiver.close()
