"""Nothing that a journal may hold stops a sink: it would fail at that line for ever."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needed
import otlp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from receiver import Receiver, receiving
from told_run import EVENTS, HOST, ToldRun, line

from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin
from resilience_sdk.telemetry.sinks.console import Console
from resilience_sdk.telemetry.sinks.otel import OpenTelemetry
from resilience_sdk.telemetry.sinks.prometheus import PrometheusTextfile
from resilience_sdk.telemetry.sinks.webhook import Webhook
from resilience_sdk.telemetry.tail import Live

_JOURNALS = st.lists(EVENTS, max_size=8)
_SOME = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def place(tmp_path: Path) -> TelemetryOrigin:
    """A place whose run has a name that is no UTF-8."""
    folder = tmp_path / "run-\udcff"
    folder.mkdir()
    return TelemetryOrigin(folder, HOST, Live(folder, None, {"RESILIENCE_PAGE_DIR": str(tmp_path)}), tmp_path, 1.0)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """One for all examples of a test: starting and ending it takes longer than any of them."""
    with receiving() as started:
        yield started


def serve(sink: Sink, events: list[dict[str, Any]]) -> None:
    """Send these events, and what is true at their end."""
    sink.open()
    items = deque(item for number, event in enumerate(events) for item in sink.digest(line(event, number)))
    items.extend(sink.finish())
    sink.send(items)
    sink.refresh()
    sink.close()


@given(_JOURNALS)
@_SOME
def test_opentelemetry(place: TelemetryOrigin, receiver: Receiver, events: list[dict[str, Any]]) -> None:
    """Everything can be written as protobuf."""
    otlp.required()
    receiver.taken.clear()
    serve(OpenTelemetry(place, receiver.url), events)
    assert [otlp.decoded(request) for request in receiver.taken]


@given(_JOURNALS)
@_SOME
def test_prometheus(place: TelemetryOrigin, tmp_path: Path, events: list[dict[str, Any]]) -> None:
    """Everything can be written as text, and read by Prometheus' own parser."""
    parser = needed.library("prometheus_client.parser", "prometheus")
    sink = PrometheusTextfile(place, str(tmp_path / "textfiles"))
    serve(sink, events)
    families = {family.name: family for family in parser.text_string_to_metric_families(sink.path.read_text())}
    assert families["resilience_journal_lines"].samples[0].value == len(events)


@given(_JOURNALS)
@_SOME
def test_webhooks(place: TelemetryOrigin, receiver: Receiver, events: list[dict[str, Any]]) -> None:
    """What is posted is JSON as others read it, without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    receiver.taken.clear()
    serve(Webhook(place, receiver.url, {event["event"] for event in events}), events)
    assert len(receiver.taken) == len(events)
    for request in receiver.taken:
        json.loads(request.body, parse_constant=refuse)


@given(_JOURNALS, st.sampled_from(["text", "json"]))
@_SOME
def test_log_lines(place: TelemetryOrigin, events: list[dict[str, Any]], form: str) -> None:
    """Whatever the standard error is."""
    serve(Console(place, form), events)


def test_a_run_whose_name_is_no_text(tmp_path: Path) -> None:
    """Is shown as well as it can be."""
    assert ToldRun.make(tmp_path).place().run == "run"
    place = TelemetryOrigin(tmp_path / "run-\udcff", HOST, ToldRun.make(tmp_path).place().live, tmp_path, 1.0)
    assert place.run.encode() == "run-\N{REPLACEMENT CHARACTER}".encode()
