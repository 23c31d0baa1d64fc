"""OpenTelemetry: metrics and spans by OTLP (HTTP with protobuf).

The spans and counters of a journal are facts of the past with times of their own, so the SDK's instruments, which
measure the present, are not used for metrics: the points are made here, and the SDK's exporters send them. What the
exporters read from the environment (`OTEL_EXPORTER_OTLP_HEADERS`, certificates, timeouts) holds.

Spans are a pure function of the journal's events: run > attempt > incident > recovery, and checkpoints. A span is told
when it has ended. Its ids follow from what it is, so that one that is sent again (a restarted exporter, an answer that
was lost) is the same span. A run ends with the next one or with the exporter: no event says so.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk._version import __version__
from resilience_sdk.core import environ
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.telemetry.metrics import DURATION_BOUNDS_S, Durations, Family, Sample, clean_text, clean_time
from resilience_sdk.telemetry.sinks.base import Metrics, Sink, TelemetryOrigin, load
from resilience_sdk.telemetry.tail import Line

Attributes = Mapping[str, str | int | float]
_MOST_OPEN = 1000
_MOST_CHARACTERS = 500
_NEVER_ENDED = {"recovery": "not recovered", "checkpoint": "cut off"}
_NO_FAULT = ("preemption", "interrupt", "membership")  # of what ends an attempt


@attrs.frozen
class Span:
    """One that has ended. Times are Unix seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: float
    end: float
    attributes: Attributes
    error: str | None = None
    """What went wrong; None where nothing did."""


@attrs.define
class _Open:
    name: str
    key: str
    parent: str | None
    start: float
    attributes: dict[str, str | int | float]


class Spans:
    """The spans that are open after some events."""

    def __init__(self, run: str) -> None:
        """`run` names the run directory: two runs have different traces."""
        self._run = run
        self._trace = ""
        self._open: dict[str, _Open] = {}
        self._has_launcher = False
        self._trouble_at: float | None = None
        self._last_at = 0.0

    def apply(self, event: Mapping[str, Any]) -> list[Span]:
        """Take one event; return the spans that have ended by it."""
        ended: list[Span] = []
        at = clean_time(float(event["t"]))
        rule = _RULES.get(str(event["event"]))
        if not self._trace and event["event"] != Event.RUN_START.value:
            ended += self._begin_run(event, at)
        if rule is not None:
            ended += rule(self, event, at)
        self._last_at = max(self._last_at, at)
        return ended

    def close(self) -> list[Span]:
        """Return what is still open, ended by the newest event: the job is over."""
        return [
            self._end(key, self._last_at, error=_NEVER_ENDED.get(self._open[key].name))
            for key in reversed(list(self._open))
        ]

    # -- rules

    def _begin_run(self, event: Mapping[str, Any], at: float) -> list[Span]:
        ended = self.close()
        self._trace = f"{self._run} {event.get('job')} {at:.6f}"
        self._trouble_at = None
        self._has_launcher = event["event"] == Event.RUN_START.value
        self._begin("run", "run", None, at, {"resilience.run": self._run, "resilience.job": str(event.get("job"))})
        return ended

    def _begin_attempt(self, event: Mapping[str, Any], at: float) -> list[Span]:
        ended = [self._end(key, self._last_at) for key in list(self._open) if key.startswith(("attempt", "save"))]
        self._trouble_at = None
        known: dict[str, str | int | float] = {"resilience.attempt": _number(event)}
        if isinstance(size := event.get("world_size"), int) and abs(size) < 1 << 63:
            known["resilience.world_size"] = size
        self._begin("attempt", _attempt(event), "run", at, known)
        return ended

    def _rank_began(self, event: Mapping[str, Any], at: float) -> list[Span]:
        """Under a foreign launcher the first rank of an attempt tells that it began."""
        is_known = self._has_launcher or _attempt(event) in self._open
        return [] if is_known else self._begin_attempt(event, at)

    def _end_attempt(self, event: Mapping[str, Any], at: float) -> list[Span]:
        key = _attempt(event)
        ended_by, codes = str(event.get("ended_by")), event.get("exit_codes")
        went_well = isinstance(codes, Mapping) and all(code in (0, EXIT_PREEMPTED) for code in codes.values())
        error = None if went_well or ended_by in _NO_FAULT else ended_by
        saves = [self._end(save, at, error="cut off") for save in list(self._open) if save.startswith("save")]
        return [*saves, *([self._end(key, at, error=error, ended_by=ended_by)] if key in self._open else [])]

    def _note_trouble(self, event: Mapping[str, Any], at: float) -> list[Span]:
        if event["event"] != Event.RANK_EXIT.value or event.get("exit_code") != 0:
            self._trouble_at = at if self._trouble_at is None else self._trouble_at
        return []

    def _incident(self, event: Mapping[str, Any], at: float) -> list[Span]:
        name = f"incident {event.get('id')}"
        words = {f"resilience.{key}": str(event.get(key)) for key in ("id", "kind", "category", "cause", "action")}
        self._begin("incident", name, _attempt(event), self._trouble_at or at, {**words})
        self._begin("recovery", f"recovery {event.get('id')}", name, at, {"resilience.id": str(event.get("id"))})
        return [self._end(name, at, error=str(event.get("cause")))]

    def _recovered(self, event: Mapping[str, Any], at: float) -> list[Span]:
        key = f"recovery {event.get('id')}"
        return [self._end(key, at)] if key in self._open else []

    def _begin_save(self, event: Mapping[str, Any], at: float) -> list[Span]:
        self._begin("checkpoint", _save(event), _attempt(event), at, {"resilience.step": str(event.get("step"))})
        return []

    def _end_save(self, event: Mapping[str, Any], at: float) -> list[Span]:
        key = _save(event)
        seconds = event.get("seconds")
        if key not in self._open and isinstance(seconds, float) and 0 <= seconds < at:
            self._begin_save(event, at - seconds)
        error = str(event.get("error")) if event["event"] == Event.CKPT_FAIL.value else None
        return [self._end(key, at, error=error)] if key in self._open else []

    # -- open and ended

    def _begin(
        self, name: str, key: str, parent: str | None, start: float, known: dict[str, str | int | float]
    ) -> None:
        while len(self._open) >= _MOST_OPEN:  # what nobody ends is forgotten, the oldest first
            del self._open[next(old for old in self._open if not old.startswith(("run", "attempt")))]
        self._open[key] = _Open(name, key, parent, start, known)

    def _end(self, key: str, at: float, *, error: str | None = None, **words: str) -> Span:
        span = self._open.pop(key)
        attributes = {**span.attributes, **{f"resilience.{name}": text for name, text in words.items()}}
        return Span(
            name=span.name,
            trace_id=_digest(self._trace, 16),
            span_id=self._id(span.key, span.start),
            parent_id=None if span.parent is None else self._id(span.parent),
            start=span.start,
            end=max(at, span.start),
            attributes={
                key: clean_text(value, _MOST_CHARACTERS) if isinstance(value, str) else value
                for key, value in attributes.items()
            },
            error=None if error is None else clean_text(error, _MOST_CHARACTERS),
        )

    def _id(self, key: str, start: float | None = None) -> int:
        """Return the id of a span: of one that may come again (a save of one step) with its beginning."""
        return _digest(f"{self._trace} {key} {start if key.startswith('save') else ''}", 8)


_Rule = Callable[[Spans, Mapping[str, Any], float], list[Span]]
_RULES: Mapping[str, _Rule] = {
    Event.RUN_START.value: Spans._begin_run,
    Event.ATTEMPT_START.value: Spans._begin_attempt,
    Event.RANK_START.value: Spans._rank_began,
    Event.ATTEMPT_END.value: Spans._end_attempt,
    Event.SUSPECT.value: Spans._note_trouble,
    Event.CONFIRMED.value: Spans._note_trouble,
    Event.RANK_EXIT.value: Spans._note_trouble,
    Event.INCIDENT.value: Spans._incident,
    Event.RECOVERED.value: Spans._recovered,
    Event.CKPT_BEGIN.value: Spans._begin_save,
    Event.CKPT_COMMIT.value: Spans._end_save,
    Event.CKPT_FAIL.value: Spans._end_save,
}


def _number(event: Mapping[str, Any]) -> int:
    number = event.get("attempt")
    return number if isinstance(number, int) and abs(number) < 1 << 63 else 0


def _attempt(event: Mapping[str, Any]) -> str:
    return f"attempt {_number(event)}"


def _save(event: Mapping[str, Any]) -> str:
    return f"save {event.get('step')} {event.get('rank')}"


def _digest(text: str, size: int) -> int:
    """Return a number of `size` bytes that is not 0, which OpenTelemetry takes for no id."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:size], "big") or 1


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
