"""The application: addresses, and what answers them.

`/` is the list, `/run/ID` the report of a run, each with an `/events` beside it that tells what changes, and
`/report/ID.html` the same report as a file. Whatever reads or renders does so in a small pool of threads, so that a
file system that hangs holds up nobody else for as long as there is a thread left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TypeVar

import attrs
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from resilience_sdk import report
from resilience_sdk.core.console import say_once
from resilience_sdk.core.words import one_line
from resilience_sdk.dashboard.access import OPEN, Door, Hosts, policy
from resilience_sdk.dashboard.feeds import EVERY_S, EventStream, Feeds
from resilience_sdk.dashboard.pages import ListPage, RunPages, environment
from resilience_sdk.dashboard.runs import RunBook

_THREADS = 4
_POOL = "resilience-dashboard"
_LIST = "list"
_STATIC = Path(__file__).parent / "static"
_OF_REPORTS = Path(report.__file__).parent / "templates"
_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_TITLES = {404: "Not here", 503: "Too many are looking"}
_MOST_CONNECTIONS = 256
_BACKLOG = 128
_ASK_WITHIN_S = 10.0
_LEAVE_WITHIN_S = 2
_EXIT_INTERRUPTED = 130
_Answer = TypeVar("_Answer")


class Dashboard:
    """The dashboard of one book of runs, as an ASGI application."""

    def __init__(
        self, book: RunBook, *, hosts: Hosts | None = None, token: str | None = None, every_s: float = EVERY_S
    ) -> None:
        """Serve `book` to who names one of `hosts` and brings `token`; None: to whoever asks."""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=_POOL)
        self.feeds = Feeds(self._pool, every_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._templates = environment()
        self._list = ListPage(book, self._templates)
        self._runs = RunPages(book)
        # All that is served as a file, by name: no path is made of a request.
        files = [path for place in (_OF_REPORTS, _STATIC) for path in place.iterdir() if path.suffix in _KINDS]
        self._static = {path.name: path.read_bytes() for path in files}
        routes = [
            Route("/", self._show_list),
            Route("/events", self._stream(self._list_events)),
            Route("/run/{id}", self._show_run),
            Route("/run/{id}/events", self._stream(self._run_events)),
            Route("/report/{name}", self._download),
            Route(OPEN + "{name}", self._file),
        ]
        failures = {HTTPException: self._failed, Exception: self._broken}
        app = Starlette(routes=routes, exception_handlers=failures, lifespan=self._lifespan)
        app.router.redirect_slashes = False  # it would lead to whatever host the request has named
        self._app: ASGIApp = Door(app, hosts or Hosts(), token, self._message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._app(scope, receive, send)

    def let_go(self) -> None:
        """End the answers of all pages that are open, which would last for ever. Any thread, also a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.feeds.close)

    def has_ended(self, within_s: float) -> bool:
        """Tell whether nobody reads any more, so many seconds after the end at the latest."""
        until_s = time.monotonic() + within_s
        for thread in threading.enumerate():
            if thread.name.startswith(_POOL):
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.name.startswith(_POOL) for thread in threading.enumerate())

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self.feeds.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_pool(self, work: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _show_list(self, _: Request) -> Response:
        return HTMLResponse((await self._in_pool(self._list.page)).html)

    def _stream(self, made: Callable[[Request], Awaitable[EventStream]]) -> _EventRoute:
        return _EventRoute(self.feeds, made)

    async def _list_events(self, _: Request) -> EventStream:
        return EventStream(self.feeds, _LIST, self._list.parts)

    async def _show_run(self, request: Request) -> Response:
        identity = request.path_params["id"]
        page = await self._in_pool(lambda: self._runs.page(identity))
        if page is None:
            raise _no_such_run()
        return HTMLResponse(page.html, headers={"Content-Security-Policy": policy(page.sources)})

    async def _run_events(self, request: Request) -> EventStream:
        identity = request.path_params["id"]
        if not await self._in_pool(lambda: self._runs.is_known(identity)):
            raise _no_such_run()
        return EventStream(self.feeds, f"run {identity}", lambda: self._runs.parts(identity))

    async def _download(self, request: Request) -> Response:
        identity, dot, kind = request.path_params["name"].rpartition(".")
        page = (
            await self._in_pool(lambda: self._runs.page(identity, live=False)) if (dot, kind) == (".", "html") else None
        )
        if page is None:
            raise _no_such_run()
        # An id is made of letters, digits and dashes.
        headers = {"Content-Disposition": f'attachment; filename="report-{identity}.html"'}
        return HTMLResponse(page.html, headers={**headers, "Content-Security-Policy": policy(page.sources)})

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (content := self._static.get(name)) is None:
            raise HTTPException(404, "There is no such file.")
        return Response(content, headers={"Content-Type": _KINDS[Path(name).suffix]})

    async def _failed(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = self._message(error.status_code, _TITLES.get(error.status_code, "This cannot be shown"), error.detail)
        return HTMLResponse(body, error.status_code)

    async def _broken(self, _: Request, error: Exception) -> Response:
        told = f"{type(error).__name__}: {one_line(error)}"
        say_once(told, f"dashboard: a page could not be made: {told}")
        return HTMLResponse(self._message(500, "This page could not be made", told), 500)

    def _message(self, status: int, title: str, text: str, asks_for_token: bool = False) -> bytes:
        page = self._templates.get_template("message.html")
        return page.render(title=title, text=text, asks_for_token=asks_for_token).encode()


def _no_such_run() -> HTTPException:
    return HTTPException(
        404, "No run of that name is known here. It may have been removed, or lie in another directory."
    )


@attrs.frozen
class _EventRoute:
    """Leads a request to its stream of events, where there is room for one more."""

    feeds: Feeds
    made: Callable[[Request], Awaitable[EventStream]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.feeds.has_room:
            raise HTTPException(503, "Close a page of this dashboard, or try again later.")
        stream = await self.made(Request(scope))
        await stream(scope, receive, send)


class _Connection(H11Protocol):
    """A connection that is cut where no whole request comes for some seconds.

    uvicorn waits for ever for the first one, and for one that has begun: silent connections would take all the places.
    """

    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait no more once a request is there, and for the next one as soon as a part of it comes."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._cut is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._cut = self.loop.call_later(_ASK_WITHIN_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None


class _Server(uvicorn.Server):
    """Ends at a signal without raising it anew, and lets go of the pages that are open."""

    def __init__(self, config: uvicorn.Config, let_go: Callable[[], None]) -> None:
        super().__init__(config)
        self._let_go = let_go
        self.was_interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; a second Ctrl-C waits for nobody."""
        is_interrupt = sig == signal.SIGINT
        self.force_exit = self.should_exit and is_interrupt
        self.was_interrupted = self.was_interrupted or is_interrupt
        self.should_exit = True
        self._let_go()


def server_config(dashboard: Dashboard) -> uvicorn.Config:
    """Return how it is served: to a bounded number, and nothing is logged."""
    return uvicorn.Config(
        dashboard, loop="asyncio", http=_Connection, ws="none", lifespan="on", log_config=None, log_level="critical",
        access_log=False, server_header=False, proxy_headers=False, limit_concurrency=_MOST_CONNECTIONS,
        backlog=_BACKLOG, timeout_graceful_shutdown=_LEAVE_WITHIN_S,
    )  # fmt: skip


def serve(dashboard: Dashboard, listening: socket.socket, begun: Callable[[], None]) -> int:
    """Serve at a bound socket until a signal ends it; `begun` is called first. Return 130 after Ctrl-C, else 0."""
    server = _Server(server_config(dashboard), dashboard.let_go)
    listening.listen(_BACKLOG)  # whoever comes after `begun` and before the loop is served all the same
    begun()
    server.run([listening])
    code = _EXIT_INTERRUPTED if server.was_interrupted else 0
    if not dashboard.has_ended(_LEAVE_WITHIN_S):
        os._exit(code)  # a thread waits for a file system that hangs, and Python would wait for the thread
    return code
