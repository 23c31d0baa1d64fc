"""Webhooks, posted to a real web server."""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path

import pytest
from receiver import Received, receiving
from told_run import ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.telemetry.exporter import Worker
from resilience_sdk.telemetry.sinks import webhook
from resilience_sdk.telemetry.sinks.webhook import Webhook, WebhookError


def items_of(run: ToldRun, sink: Webhook) -> deque[object]:
    """Return what is to be posted of a run."""
    return deque(item for line in run.lines() for item in sink.digest(line))


def test_an_event_is_posted_with_its_facts_and_a_line_for_people(run: ToldRun) -> None:
    """Only the chosen events, with an id that stays the same."""
    with receiving() as receiver:
        sink = Webhook(run.place(), f"{receiver.url}/T0/B0?key=x", ("incident", "recovered"))
        items = items_of(run, sink)
        sink.send(items)
        assert not items
    first, second = receiver.taken
    said = json.loads(first.body)
    assert first.path == "/T0/B0?key=x"
    assert first.headers["content-type"] == "application/json"
    assert first.headers["idempotency-key"] == said["id"]
    assert (said["run"], said["node"], said["event"]["cause"]) == ("run", "here", "link_down")
    assert "incident" in said["text"]
    assert "link_down" in said["text"]
    assert "\n" not in said["text"]
    assert json.loads(second.body)["event"]["event"] == "recovered"
    assert items_of(run, sink)[0]["id"] == said["id"]  # type: ignore[index]


def test_secrets_are_not_posted(tmp_path: Path) -> None:
    """Also where a line of the journal holds one, whoever wrote it."""
    run = ToldRun.make(tmp_path)
    path = run.run_dir.journal / "here-foreign-1.jsonl"
    event = {"event": "degraded", "t": 1.0, "host": "here", "api_key": "s3cret", "why": "http://me:s3cret@host/"}
    path.write_text(json.dumps(event) + "\n")
    sink = Webhook(run.place(), "http://127.0.0.1:9", ("degraded",))
    assert "s3cret" not in json.dumps(list(items_of(run, sink)))


def test_what_was_not_taken_is_posted_again_and_nothing_twice(run: ToldRun) -> None:
    """The receiver is ill for a while: each event arrives once in the end."""
    answers = [200, 503, 429]
    with receiving(lambda _: answers.pop(0) if answers else 200) as receiver:
        sink = Webhook(run.place(), receiver.url, ("incident", "recovered"))
        items = items_of(run, sink)
        for status in (503, 429):
            with pytest.raises(WebhookError, match=str(status)):
                sink.send(items)
        sink.send(items)
    assert [json.loads(request.body)["event"]["event"] for request in receiver.taken] == ["incident", "recovered"]


def test_an_event_that_is_refused_for_ever_is_passed_over(run: ToldRun, capsys: pytest.CaptureFixture[str]) -> None:
    """It must not hold up those behind it; that is said, once."""
    with receiving(lambda request: 400 if b'"incident"' in request.body else 200) as receiver:
        sink = Webhook(run.place(), receiver.url, ("incident", "recovered"))
        sink.send(items_of(run, sink))
    assert len(receiver.all) == 2
    assert "refuses events incident" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_one_that_is_refused_like_a_wrong_address_holds_up_nobody(
    run: ToldRun, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """A filter before the receiver dislikes it: the next one is taken, and then it is asked once more, and given up."""
    with receiving(lambda request: status if b'"incident"' in request.body else 200) as receiver:
        sink = Webhook(run.place(), receiver.url, ("incident", "recovered"))
        items = items_of(run, sink)
        sink.send(items)
        sink.refresh()
    assert not items
    assert [json.loads(request.body)["event"]["event"] for request in receiver.taken] == ["recovered"]
    assert len(receiver.all) == 3
    assert f"refuses events incident (status {status})" in capsys.readouterr().err


def test_what_came_while_the_address_was_wrong_is_posted_once_it_is_right(run: ToldRun) -> None:
    """It is a failure until then, the memory of the sink has it, and so another exporter has it too."""
    right: list[bool] = []
    with receiving(lambda _: 200 if right else 404) as receiver:
        first = Webhook(run.place(), receiver.url, ("incident", "recovered"))
        first.send(items_of(run, first))
        for _ in range(2):
            with pytest.raises(WebhookError, match="404"):
                first.refresh()
        second = Webhook(run.place(), receiver.url, ("incident", "recovered"))
        second.memory = json.loads(json.dumps(first.memory))
        right.append(True)
        second.refresh()
        second.refresh()
    assert [json.loads(request.body)["event"]["event"] for request in receiver.taken] == ["incident", "recovered"]


def test_an_exporter_goes_on_behind_an_event_that_is_refused(run: ToldRun) -> None:
    """It fails as long as nothing else was taken, and what happens later arrives all the same."""
    told: list[str] = []
    with receiving(lambda request: 403 if b'"incident"' in request.body else 200) as receiver:
        worker = Worker(
            Webhook(run.place(), receiver.url, ("incident", "finished")), run.run_dir.journal,
            note_failure=lambda _, error: told.append(str(error)), note_recovery=lambda *_: told.append("recovered"),
            first_pause_s=0.01, poll_s=0.01,
        )  # fmt: skip
        worker.start()
        receiver.wait_for_all(lambda asked: len(asked) >= 3)
        run.tell(Event.FINISHED)
        receiver.wait_for(lambda taken: len(taken) == 1)
        worker.finish()
        assert worker.join(20)
    assert told == ["the receiver answered with status 403", "recovered"]


def test_a_wrong_address_has_not_recovered_because_another_event_came(run: ToldRun) -> None:
    """That one was laid aside like the others; it works again when one is taken."""
    run.tell(Event.DEGRADED, what="one")
    recovered, right = threading.Event(), threading.Event()
    with receiving(lambda _: 200 if right.is_set() else 404) as receiver:
        worker = Worker(
            Webhook(run.place(), receiver.url, ["degraded"]),
            run.run_dir.journal,
            note_failure=lambda *_: run.tell(Event.DEGRADED, what="another"),
            note_recovery=lambda *_: recovered.set(),
            first_pause_s=0.01,
            poll_s=0.02,
        )
        worker.start()
        receiver.wait_for_all(lambda posts: sum(b"another" in post.body for post in posts) > 1)
        assert not recovered.is_set()
        right.set()
        assert recovered.wait(20)
        worker.finish()
        assert worker.join(20)


def test_a_receiver_is_not_stormed_at_the_end(run: ToldRun) -> None:
    """All nodes of a job end at once: who is told to come later comes ever later, and soon once more."""
    run.tell(Event.DEGRADED, what="one")
    with receiving(lambda _: 429) as receiver:
        worker = Worker(
            Webhook(run.place(), receiver.url, ["degraded"]),
            run.run_dir.journal,
            note_failure=lambda *_: None,
            note_recovery=lambda *_: None,
        )
        worker.start()
        worker.finish()
        assert not worker.join(3)
        assert 0 < len(receiver.all) <= 7


def test_a_wrong_address_fills_no_memory(run: ToldRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number the events wait in the journal."""
    monkeypatch.setattr(webhook, "_MOST_WAITING", 2)
    for number in range(2, 5):
        run.fail_and_recover(number)
    right: list[bool] = []
    with receiving(lambda _: 200 if right else 403) as receiver:
        sink = Webhook(run.place(), receiver.url, ("incident",))
        items = items_of(run, sink)
        with pytest.raises(WebhookError, match="403"):
            sink.send(items)
        assert (len(sink.memory["refused"]), len(items)) == (2, 2)
        right.append(True)
        sink.send(items)
    assert sorted(json.loads(request.body)["event"]["id"] for request in receiver.taken) == [
        f"{number:04}-hang" for number in range(1, 5)
    ]


def test_nobody_is_redirected(run: ToldRun) -> None:
    """Who gets the events is for the settings to say; and the error does not name the address."""

    def answer(request: Received) -> int:
        return 200 if request.path == "/elsewhere" else 307

    with receiving(answer) as receiver:
        sink = Webhook(run.place(), f"{receiver.url}/s3cret", ("incident",))
        with pytest.raises(WebhookError, match="307") as caught:
            sink.send(items_of(run, sink))
    assert receiver.taken == []
    assert "s3cret" not in str(caught.value)


def test_a_receiver_that_is_gone(run: ToldRun) -> None:
    """Is an error that can be tried again, and names no address."""
    with receiving() as receiver:
        url = f"{receiver.url}/s3cret"
    sink = Webhook(run.place(), url, ("incident",))
    items = items_of(run, sink)
    with pytest.raises(WebhookError, match="cannot be reached") as caught:
        sink.send(items)
    assert len(items) == 1
    assert "s3cret" not in str(caught.value)


def test_an_address_that_cannot_be_asked_is_not_named(run: ToldRun) -> None:
    """What refuses it before anything is sent quotes it."""
    for url in ("http://127.0.0.1:9/s3cret\x01", "http://127.0.0.1:9/s3cret-\xe9"):
        sink = Webhook(run.place(), url, ("incident",))
        with pytest.raises(WebhookError) as caught:
            sink.send(items_of(run, sink))
        assert "s3cret" not in str(caught.value)
