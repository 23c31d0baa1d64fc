"""The sinks, and which of them the settings ask for. A sink's library is imported when it opens, never here."""

from __future__ import annotations

from collections.abc import Callable

from resilience_sdk.core.settings import Settings
from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin


def _prometheus(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.prometheus import PrometheusServer

    if (address := settings.prometheus_address) is None:
        return None
    token = settings.prometheus_token
    return PrometheusServer(place, address, None if token == "none" else token)  # noqa: S105 - the word for no token


def _textfile(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.prometheus import PrometheusTextfile

    return PrometheusTextfile(place, directory) if (directory := settings.prometheus_textfile) is not None else None


def _otel(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.otel import OpenTelemetry

    return OpenTelemetry(place, endpoint) if (endpoint := settings.otlp_endpoint) is not None else None


def _webhook(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.webhook import Webhook

    return Webhook(place, url, settings.webhook_events) if (url := settings.webhook_url) is not None else None


def _tensorboard(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.tensorboard import TensorBoard

    return TensorBoard(place, directory) if (directory := settings.tensorboard_dir) is not None else None


def _wandb(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.wandb import WeightsAndBiases

    return WeightsAndBiases(place, project) if (project := settings.wandb_project) is not None else None


def _mlflow(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.mlflow import MLflow

    return MLflow(place, uri) if (uri := settings.mlflow_uri) is not None else None


def _history(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.history import HistorySink

    return HistorySink(place, database) if (database := settings.db) is not None else None


def _console(settings: Settings, place: TelemetryOrigin) -> Sink | None:
    from resilience_sdk.telemetry.sinks.console import Console

    return None if settings.event_log == "off" else Console(place, settings.event_log)


_Maker = Callable[[Settings, TelemetryOrigin], "Sink | None"]
_MAKERS: tuple[_Maker, ...] = (
    _prometheus,
    _textfile,
    _otel,
    _webhook,
    _tensorboard,
    _wandb,
    _mlflow,
    _history,
    _console,
)


def wanted_sinks(settings: Settings, place: TelemetryOrigin) -> list[Sink]:
    """Return the sinks that are set, not yet open."""
    return [sink for make in _MAKERS if (sink := make(settings, place)) is not None]
