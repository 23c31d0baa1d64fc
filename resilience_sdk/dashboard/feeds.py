"""Feeds: what open pages are told of, as server-sent events.

A feed follows one subject (the list, a run) while somebody looks at it, and reads once for all who do. It knows its
subject as parts, each a text; a viewer gets those that have changed, at most once a second. What a viewer has not taken
yet is replaced by what is newer, so one that is slow costs no memory, and one that takes nothing is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

EVERY_S = 1.0
HEARTBEAT_S = 15.0
RETRY_MS = 2000
_SEND_WITHIN_S = 20.0
_MOST_VIEWERS = 100
_BUSY_SHARE = 0.1  # of a core, for one subject
_LONGEST_PAUSE_S = 3.0

Parts = Mapping[str, str]


def digest(text: str) -> str:
    """Return a short sum, by which a page knows whether it shows that text already."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


@attrs.define(eq=False)
class Viewer:
    """An open page. In the thread of the loop only."""

    has_news: asyncio.Event = attrs.field(factory=asyncio.Event)
    is_over: bool = False
    _changed: dict[str, str] = attrs.field(factory=dict)
    _gone: set[str] = attrs.field(factory=set)

    def tell(self, changed: Parts, gone: set[str]) -> None:
        """Keep what is to be sent; what is older and was not sent yet is not sent any more."""
        for name in gone:
            self._changed.pop(name, None)
        self._gone = (self._gone | gone) - changed.keys()
        self._changed.update(changed)
        self.has_news.set()

    def end(self) -> None:
        """Let go of it."""
        self.is_over = True
        self.has_news.set()

    def take(self) -> bytes:
        """Return what is to be sent as one event, and keep nothing."""
        parts = {name: [digest(text), text] for name, text in self._changed.items()}
        told = {"parts": parts, "gone": sorted(self._gone)}
        self._changed, self._gone = {}, set()
        self.has_news.clear()
        # JSON without line breaks, and in ASCII: nothing in it can end the event.
        return f"event: parts\ndata: {json.dumps(told)}\n\n".encode("ascii")


class Feed:
    """One subject that is followed while somebody looks at it. In the thread of the loop only, but for `read`."""

    def __init__(self, read: Callable[[], Parts], pool: Executor, every_s: float) -> None:
        """Have `read` called in `pool`; it may take its time."""
        self._read = read
        self._pool = pool
        self._every_s = every_s
        self.viewers: set[Viewer] = set()
        self._known: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def join(self, viewer: Viewer) -> None:
        """Tell a new viewer what is known, and begin to follow where nobody looked before."""
        self.viewers.add(viewer)
        if self._known:
            viewer.tell(self._known, set())
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def leave(self, viewer: Viewer) -> None:
        """Follow no more once nobody looks."""
        self.viewers.discard(viewer)
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                parts = dict(await loop.run_in_executor(self._pool, self._read))
            except Exception as error:  # noqa: BLE001 - whatever it is, the page says it and the next look may do
                parts = {**self._known, "trouble": f"{type(error).__name__}: {error}"}
            changed = {name: text for name, text in parts.items() if self._known.get(name) != text}
            gone = self._known.keys() - parts.keys()
            self._known = parts
            if changed or gone:
                for viewer in self.viewers:
                    viewer.tell(changed, set(gone))
            took_s = loop.time() - began_s
            await asyncio.sleep(max(self._every_s, min(took_s / _BUSY_SHARE, _LONGEST_PAUSE_S)))


class Feeds:
    """All feeds, and everybody who looks. In the thread of the loop only."""

    def __init__(self, pool: Executor, every_s: float = EVERY_S) -> None:
        """Begin with nobody."""
        self._pool = pool
        self._every_s = every_s
        self._feeds: dict[str, Feed] = {}
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether one more may look."""
        return not self._is_closed and sum(len(feed.viewers) for feed in self._feeds.values()) < _MOST_VIEWERS

    @property
    def followed(self) -> frozenset[str]:
        """The subjects that somebody looks at."""
        return frozenset(self._feeds)

    def close(self) -> None:
        """Let go of everybody: the server ends."""
        self._is_closed = True
        for feed in self._feeds.values():
            for viewer in feed.viewers:
                viewer.end()

    @contextlib.contextmanager
    def viewing(self, subject: str, read: Callable[[], Parts]) -> Iterator[Viewer]:
        """Have somebody look at a subject in the block."""
        feed = self._feeds.get(subject)
        if feed is None:
            feed = self._feeds[subject] = Feed(read, self._pool, self._every_s)
        viewer = Viewer()
        feed.join(viewer)
        try:
            yield viewer
        finally:
            feed.leave(viewer)
            if not feed.viewers and self._feeds.get(subject) is feed:
                del self._feeds[subject]


@attrs.frozen
class EventStream:
    """The answer to an open page: events until it goes, takes nothing any more, or the server ends."""

    feeds: Feeds
    subject: str
    read: Callable[[], Parts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        with self.feeds.viewing(self.subject, self.read) as viewer:
            leaving = asyncio.get_running_loop().create_task(_until_gone(receive, viewer))
            try:
                async for data in _events(viewer):
                    body = {"type": "http.response.body", "body": data, "more_body": True}
                    await asyncio.wait_for(send(body), _SEND_WITHIN_S)
            except asyncio.TimeoutError:
                return  # it takes nothing; without its end the answer is known to be cut off
            finally:
                leaving.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _events(viewer: Viewer) -> AsyncIterator[bytes]:
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not viewer.is_over:
        try:
            await asyncio.wait_for(viewer.has_news.wait(), HEARTBEAT_S)
        except asyncio.TimeoutError:
            yield b": still here\n\nevent: beat\ndata: 0\n\n"  # a comment is for proxies, no page is told of it
            continue
        if not viewer.is_over:
            yield viewer.take()


async def _until_gone(receive: Receive, viewer: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.end()
