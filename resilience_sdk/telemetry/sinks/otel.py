"""OpenTelemetry: metrics and spans by OTLP (HTTP with protobuf).

The spans and counters of a journal are facts of the past with times of their own, so the SDK's instruments, which
measure the present, are not used for metrics: the points are made here, and the SDK's exporters send them. What the
exporters read from the environment (`OTEL_EXPORTER_OTLP_HEADERS`, certificates, timeouts) holds.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from resilience_sdk._version import __version__
from resilience_sdk.core import environ
from resilience_sdk.telemetry.metrics import DURATION_BOUNDS_S, Durations, Family, Sample
from resilience_sdk.telemetry.sinks.base import Metrics, Sink, TelemetryOrigin, load
from resilience_sdk.telemetry.spans import Span, Spans
from resilience_sdk.telemetry.tail import Line

_EXTRA = "otel"
_HTTP = "opentelemetry.exporter.otlp.proto.http"
_SCOPE = "resilience_sdk.telemetry"
_TIMEOUT_S = 10.0
_MOST_SPANS = 500  # in one request
_OFF = "OTEL_SDK_DISABLED"


class ExportError(Exception):
    """The collector did not take metrics or spans; the exporter has logged why."""


class OpenTelemetry(Sink):
    """Sends spans as they end, and all metrics every interval, to a collector."""

    name = "otel"

    def __init__(self, place: TelemetryOrigin, endpoint: str) -> None:
        """Send to the collector at `endpoint`, such as `http://localhost:4318`."""
        super().__init__(place)
        self._endpoint = endpoint
        self._metrics = Metrics(place)
        self._spans = Spans(place.run)
        self._metric_exporter: Any = None
        self._span_exporter: Any = None
        self._made: Any = None

    def open(self) -> None:
        """Import the SDK and make its exporters; nothing is sent yet.

        Raises ExportError where a variable turns the SDK off: then it makes no spans.
        """
        if environ.environment().get(_OFF, "").strip().lower() == "true":
            raise ExportError(f"{_OFF}=true turns OpenTelemetry's SDK off: unset it, or otlp_endpoint")
        metric_exporter = load(f"{_HTTP}.metric_exporter", extra=_EXTRA).OTLPMetricExporter
        span_exporter = load(f"{_HTTP}.trace_exporter", extra=_EXTRA).OTLPSpanExporter
        self._metric_exporter = metric_exporter(endpoint=f"{self._endpoint}/v1/metrics", timeout=_TIMEOUT_S)
        self._span_exporter = span_exporter(endpoint=f"{self._endpoint}/v1/traces", timeout=_TIMEOUT_S)
        resource = load("opentelemetry.sdk.resources", extra=_EXTRA).Resource.create(
            {
                "service.name": "resilience",
                "service.version": __version__,
                "service.instance.id": f"{self.place.run}@{self.place.host}",
                "host.name": self.place.host,
                "resilience.run": self.place.run,
            }
        )
        self._made = _Maker(resource)

    def digest(self, line: Line) -> Sequence[Span]:
        """Return the spans that end with a line."""
        self._metrics.apply(line.event)
        return self._spans.apply(line.event)

    def note_torn(self, lines: int) -> None:
        """Count them."""
        self._metrics.tally.apply_torn(lines)

    def finish(self) -> Sequence[Span]:
        """Return the spans that end with the job."""
        return self._spans.close()

    def send(self, items: deque[Span]) -> None:
        """Send spans; raises ExportError."""
        while items:
            some = list(itertools.islice(items, _MOST_SPANS))
            result = self._span_exporter.export([self._made.span(span) for span in some])
            if result.name != "SUCCESS":
                raise ExportError(f"{self._endpoint} did not take {len(some)} spans")
            for _ in some:
                items.popleft()

    def refresh(self) -> None:
        """Send all metrics as they are now; raises ExportError."""
        began = self._metrics.tally.first_at or time.time()
        data = self._made.metrics(self._metrics.all(), began_ns=_nanoseconds(began), now_ns=time.time_ns())
        if self._metric_exporter.export(data, timeout_millis=_TIMEOUT_S * 1000).name != "SUCCESS":
            raise ExportError(f"{self._endpoint} did not take the metrics")

    def close(self) -> None:
        """Let the exporters go."""
        for exporter in (self._metric_exporter, self._span_exporter):
            if exporter is not None:
                exporter.shutdown()
        self._metric_exporter = self._span_exporter = None


class _Maker:
    """Makes the SDK's records from ours."""

    def __init__(self, resource: Any) -> None:
        self._resource = resource
        self._api = load("opentelemetry.trace", extra=_EXTRA)
        self._export = load("opentelemetry.sdk.metrics.export", extra=_EXTRA)
        self._scope = load("opentelemetry.sdk.util.instrumentation", extra=_EXTRA).InstrumentationScope(
            _SCOPE, __version__
        )
        sdk = load("opentelemetry.sdk.trace", extra=_EXTRA)
        sampling = load("opentelemetry.sdk.trace.sampling", extra=_EXTRA)
        self._ids, self._ended = _id_generator()(), _collector()()
        provider = sdk.TracerProvider(
            resource=resource, sampler=sampling.ALWAYS_ON, id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(_SCOPE, __version__)

    def span(self, span: Span) -> Any:
        """Return the SDK's record of a span, with the ids and times that it has."""
        api = self._api
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        context = api.set_span_in_context(api.INVALID_SPAN)
        if span.parent_id is not None:
            parent = api.SpanContext(
                span.trace_id, span.parent_id, is_remote=False, trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED)
            )
            context = api.set_span_in_context(api.NonRecordingSpan(parent))
        made = self._tracer.start_span(
            f"resilience.{span.name}",
            context=context,
            attributes=dict(span.attributes),
            start_time=_nanoseconds(span.start),
        )
        if span.error is not None:
            made.set_status(api.Status(api.StatusCode.ERROR, span.error))
        made.end(_nanoseconds(span.end))
        return self._ended.spans.pop()

    def metrics(self, samples: Sequence[Sample], *, began_ns: int, now_ns: int) -> Any:
        """Return the samples as one message; counters began with the journal, whichever process tells them."""
        export = self._export
        made = [
            self._metric(family, list(group), began_ns, now_ns)
            for family, group in itertools.groupby(samples, key=lambda sample: sample.family)
        ]
        scope = export.ScopeMetrics(scope=self._scope, metrics=made, schema_url="")
        resource = export.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
        return export.MetricsData(resource_metrics=[resource])

    def _metric(self, family: Family, samples: list[Sample], began_ns: int, now_ns: int) -> Any:
        export = self._export
        cumulative = export.AggregationTemporality.CUMULATIVE
        points = [self._point(sample, began_ns, now_ns) for sample in samples]
        data = {
            "counter": lambda: export.Sum(points, aggregation_temporality=cumulative, is_monotonic=True),
            "gauge": lambda: export.Gauge(points),
            "histogram": lambda: export.Histogram(points, aggregation_temporality=cumulative),
        }[family.kind]()
        return export.Metric(name=family.otel_name, description=family.about, unit=family.unit, data=data)

    def _point(self, sample: Sample, began_ns: int, now_ns: int) -> Any:
        export = self._export
        labels = dict(zip(sample.family.labels, sample.labels, strict=True))
        times = {"attributes": labels, "start_time_unix_nano": began_ns, "time_unix_nano": now_ns}
        if not isinstance(sample.value, Durations):
            return export.NumberDataPoint(**times, value=sample.value)
        durations = sample.value
        return export.HistogramDataPoint(
            **times,
            count=durations.count,
            sum=durations.sum_s,
            bucket_counts=tuple(durations.counts),
            explicit_bounds=DURATION_BOUNDS_S,
            min=durations.least_s,
            max=durations.most_s,
        )


def _id_generator() -> Any:
    base = load("opentelemetry.sdk.trace.id_generator", extra=_EXTRA).IdGenerator

    class Told(base):  # type: ignore[misc, valid-type]
        """Gives the ids that it was told."""

        trace_id = span_id = 1

        def generate_span_id(self) -> int:
            return self.span_id

        def generate_trace_id(self) -> int:
            return self.trace_id

    return Told


def _collector() -> Any:
    base = load("opentelemetry.sdk.trace", extra=_EXTRA).SpanProcessor

    class Ended(base):  # type: ignore[misc, valid-type]
        """Keeps the spans that have ended."""

        def __init__(self) -> None:
            self.spans: list[Any] = []

        def on_end(self, span: Any) -> None:
            self.spans.append(span)

    return Ended


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
