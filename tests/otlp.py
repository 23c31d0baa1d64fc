"""What an OpenTelemetry collector receives, decoded with OpenTelemetry's own protobuf messages."""

from __future__ import annotations

import gzip
from typing import Any

import needed
from receiver import Received


def required() -> None:
    """Skip or fail the test where OpenTelemetry is not installed."""
    needed.library("opentelemetry.exporter.otlp.proto.http", "otel")


def decoded(request: Received) -> Any:
    """Return the message of a request."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    body = gzip.decompress(request.body) if request.headers.get("content-encoding") == "gzip" else request.body
    kind = ExportTraceServiceRequest if request.path == "/v1/traces" else ExportMetricsServiceRequest
    return kind.FromString(body)


def attributes(of: Any) -> dict[str, Any]:
    """Return attributes as plain values."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in of.attributes}


def spans_of(requests: list[Received]) -> list[Any]:
    """Return every span that was sent, in the order of the requests."""
    sent = [decoded(request) for request in requests if request.path == "/v1/traces"]
    return [
        span
        for message in sent
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def metrics_of(request: Received) -> dict[str, Any]:
    """Return the metrics of one request by name."""
    return {
        metric.name: metric
        for resource in decoded(request).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
