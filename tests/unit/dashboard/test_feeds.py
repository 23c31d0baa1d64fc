"""Feeds: one reader for all who look, what changes and nothing else, and nothing at all while nobody looks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from resilience_sdk.dashboard import feeds
from resilience_sdk.dashboard.feeds import EventStream, Feeds, Viewer, digest

EVERY_S = 0.01
PATIENCE_S = 20.0


class Subject:
    """Something that is followed, and how often it was read."""

    def __init__(self, **parts: str) -> None:
        self.parts = parts
        self.reads = 0
        self.readers: set[str] = set()

    def read(self) -> dict[str, str]:
        self.reads += 1
        self.readers.add(threading.current_thread().name)
        return dict(self.parts)


class Page:
    """An open page: takes the events of a stream until it leaves."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.texts: list[str] = []
        self.left = asyncio.Event()
        self.arrived = asyncio.Condition()
        self.task = asyncio.ensure_future(stream({"type": "http", "method": "GET"}, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        async with self.arrived:
            self.texts.append(message.get("body", b"").decode())
            self.arrived.notify_all()

    @property
    def told(self) -> list[dict[str, Any]]:
        """What the events said."""
        data = [line for text in self.texts for line in text.splitlines() if line.startswith("data: {")]
        return [json.loads(line[len("data: ") :]) for line in data]

    async def until(self, happened: Callable[[], bool]) -> None:
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(happened), PATIENCE_S)

    async def leave(self) -> None:
        self.left.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


def with_feeds(test: Callable[[Feeds], Awaitable[None]]) -> None:
    """Run a test that has feeds."""
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:

        async def main() -> None:
            await test(Feeds(pool, EVERY_S))

        asyncio.run(main())


def test_a_page_is_told_what_changes() -> None:
    """First all, for it may have missed something; then what is new, and what is gone."""

    async def test(all_feeds: Feeds) -> None:
        subject = Subject(a="1", b="2")
        page = Page(EventStream(all_feeds, "x", subject.read))
        await page.until(lambda: len(page.told) == 1)
        assert page.texts[1] == f"retry: {feeds.RETRY_MS}\n\n"
        assert page.told[0] == {"parts": {"a": [digest("1"), "1"], "b": [digest("2"), "2"]}, "gone": []}
        subject.parts = {"a": "3\n\ndata: not an event", "b": "2"}
        await page.until(lambda: len(page.told) == 2)
        assert page.told[1] == {"parts": {"a": [digest(subject.parts["a"]), subject.parts["a"]]}, "gone": []}
        subject.parts = {"a": subject.parts["a"]}
        await page.until(lambda: len(page.told) == 3)
        assert page.told[2] == {"parts": {}, "gone": ["b"]}
        await page.leave()

    with_feeds(test)


def test_one_reads_for_all_and_nobody_for_none() -> None:
    """The work does not grow with the pages, is not done in the loop, and ends with the last page."""

    async def test(all_feeds: Feeds) -> None:
        subject = Subject(a="1")
        pages = [Page(EventStream(all_feeds, "x", subject.read)) for _ in range(20)]
        for page in pages:
            await page.until(lambda page=page: len(page.told) == 1)
        assert all_feeds.followed == {"x"}
        reads = subject.reads
        assert reads <= 4
        assert all(name.startswith("pool") for name in subject.readers)
        for page in pages:
            await page.leave()
        assert all_feeds.followed == frozenset()
        reads = subject.reads
        await asyncio.sleep(10 * EVERY_S)  # that nothing happens can only be waited for
        assert subject.reads <= reads + 1  # which was under way

    with_feeds(test)


def test_a_reader_that_fails_is_told_and_read_again() -> None:
    """What was known stays on the page."""

    async def test(all_feeds: Feeds) -> None:
        subject = Subject(a="1")
        failing: list[Exception] = []

        def read() -> dict[str, str]:
            if failing:
                raise failing[0]
            return subject.read()

        page = Page(EventStream(all_feeds, "x", read))
        await page.until(lambda: len(page.told) == 1)
        failing.append(OSError("the disk is gone"))
        await page.until(lambda: len(page.told) == 2)
        assert page.told[1]["parts"]["trouble"][1] == "OSError: the disk is gone"
        failing.clear()
        await page.until(lambda: len(page.told) == 3)
        assert page.told[2] == {"parts": {}, "gone": ["trouble"]}
        await page.leave()

    with_feeds(test)


def test_a_page_that_takes_nothing_is_let_go(monkeypatch: Any) -> None:
    """It costs one copy of what it has not taken, delays nobody, and is dropped after a while."""
    monkeypatch.setattr(feeds, "_SEND_WITHIN_S", 0.2)

    async def test(all_feeds: Feeds) -> None:
        subject = Subject(a="0")

        class Stuck(Page):
            async def send(self, message: Any) -> None:
                if "data: {" in message.get("body", b"").decode():
                    await asyncio.Event().wait()

        stuck, page = (kind(EventStream(all_feeds, "x", subject.read)) for kind in (Stuck, Page))
        for number in range(1, 6):
            subject.parts = {"a": str(number)}
            await page.until(lambda number=number: page.told[-1:] and page.told[-1]["parts"]["a"][1] == str(number))
        await asyncio.wait_for(stuck.task, PATIENCE_S)
        assert not page.task.done()
        await page.leave()

    with_feeds(test)


def test_what_is_newer_takes_the_place_of_what_was_not_sent() -> None:
    """Also a part that went, and one that came back."""
    viewer = Viewer()
    viewer.tell({"a": "1", "b": "1"}, set())
    viewer.tell({"a": "2"}, {"b", "c"})
    viewer.tell({"c": "3"}, set())
    told = json.loads(viewer.take().decode().partition("data: ")[2])
    assert told == {"parts": {"a": [digest("2"), "2"], "c": [digest("3"), "3"]}, "gone": ["b"]}
    assert not viewer.has_news.is_set()


def test_a_page_hears_something_while_nothing_changes(monkeypatch: Any) -> None:
    """A comment for proxies, an event for the page; and when the server ends, so does the answer."""
    monkeypatch.setattr(feeds, "HEARTBEAT_S", 0.05)

    async def test(all_feeds: Feeds) -> None:
        page = Page(EventStream(all_feeds, "x", Subject(a="1").read))
        await page.until(lambda: sum(": still here" in text for text in page.texts) >= 2)
        assert "event: beat" in page.texts[-1]
        all_feeds.close()
        await asyncio.wait_for(page.task, PATIENCE_S)
        assert not all_feeds.has_room

    with_feeds(test)


def test_there_is_room_for_so_many(monkeypatch: Any) -> None:
    """Whoever comes then is told to try again."""
    monkeypatch.setattr(feeds, "_MOST_VIEWERS", 2)

    async def test(all_feeds: Feeds) -> None:
        pages = [Page(EventStream(all_feeds, name, Subject(a="1").read)) for name in "xy"]
        for page in pages:
            await page.until(lambda page=page: len(page.told) == 1)
        assert not all_feeds.has_room
        for page in pages:
            await page.leave()
        assert all_feeds.has_room

    with_feeds(test)
