"""OpenTelemetry: what a collector receives, decoded with OpenTelemetry's own protobuf messages."""

from __future__ import annotations

from collections import deque

import otlp
import pytest
from otlp import attributes, decoded, metrics_of, spans_of
from receiver import receiving
from told_run import ToldRun

from resilience_sdk.telemetry.sinks.otel import ExportError, OpenTelemetry

otlp.required()


def export(run: ToldRun, url: str) -> OpenTelemetry:
    """Send everything that was told."""
    sink = OpenTelemetry(run.place(), url)
    sink.open()
    try:
        items = deque(item for line in run.lines() for item in sink.digest(line))
        items.extend(sink.finish())
        sink.send(items)
        sink.refresh()
    finally:
        sink.close()
    return sink


def test_a_collector_gets_the_spans(run: ToldRun) -> None:
    """With the times of the journal, parents that were sent too, and the error of what went wrong."""
    with receiving() as receiver:
        export(run, receiver.url)
    (request,) = [request for request in receiver.taken if request.path == "/v1/traces"]
    (resource,) = decoded(request).resource_spans
    assert attributes(resource.resource)["service.name"] == "resilience"
    assert attributes(resource.resource)["host.name"] == "here"
    spans = spans_of(receiver.taken)
    by_id = {span.span_id: span for span in spans}
    parents = {span.name: by_id[span.parent_span_id].name for span in spans if span.parent_span_id}
    assert parents == {
        "resilience.attempt": "resilience.run",
        "resilience.incident": "resilience.attempt",
        "resilience.recovery": "resilience.incident",
    }
    assert len({span.trace_id for span in spans}) == 1
    incident = next(span for span in spans if span.name == "resilience.incident")
    assert (incident.status.code, incident.status.message) == (2, "link_down")
    assert attributes(incident)["resilience.kind"] == "hang"
    first = min(float(line.event["t"]) for line in run.lines())
    assert min(span.start_time_unix_nano for span in spans) == pytest.approx(first * 1e9, abs=1e3)


def test_a_variable_that_turns_the_sdk_off_is_named(run: ToldRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no spans then; that nothing is sent must not look like a fault of ours."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    with receiving() as receiver, pytest.raises(ExportError, match="OTEL_SDK_DISABLED"):
        export(run, receiver.url)
    assert receiver.all == []


def test_a_collector_gets_the_metrics(run: ToldRun) -> None:
    """Cumulative from the first event of the journal, in OpenTelemetry's names and units."""
    with receiving() as receiver:
        export(run, receiver.url)
    (request,) = [request for request in receiver.taken if request.path == "/v1/metrics"]
    found = metrics_of(request)
    incidents = found["resilience.incidents"].sum
    assert (incidents.is_monotonic, incidents.aggregation_temporality) == (True, 2)
    (point,) = incidents.data_points
    assert (point.as_double, attributes(point)) == (
        1.0,
        {"kind": "hang", "category": "network", "cause": "link_down"},
    )
    first = min(float(line.event["t"]) for line in run.lines())
    assert point.start_time_unix_nano == pytest.approx(first * 1e9, abs=1e3)
    recovery = found["resilience.recovery.duration"]
    (durations,) = recovery.histogram.data_points
    assert (recovery.unit, durations.count, durations.sum, sum(durations.bucket_counts)) == ("s", 1, 4.0, 1)
    assert len(durations.bucket_counts) == len(durations.explicit_bounds) + 1
    assert found["resilience.run.up"].gauge.data_points[0].as_double == 1.0


def test_the_spans_that_are_sent_again_are_the_same(run: ToldRun) -> None:
    """By their ids, a collector knows them."""
    with receiving() as receiver:
        export(run, receiver.url)
        export(run, receiver.url)
        first, second = [decoded(request) for request in receiver.taken if request.path == "/v1/traces"]
    assert first.resource_spans[0].scope_spans == second.resource_spans[0].scope_spans


def test_what_a_collector_refuses_is_kept(run: ToldRun) -> None:
    """So that it is sent again."""
    with receiving(lambda _: 400) as receiver:
        sink = OpenTelemetry(run.place(), receiver.url)
        sink.open()
        items = deque(item for line in run.lines() for item in sink.digest(line))
        count = len(items)
        with pytest.raises(ExportError, match="did not take"):
            sink.send(items)
        with pytest.raises(ExportError, match="metrics"):
            sink.refresh()
        sink.close()
    assert len(items) == count > 0
