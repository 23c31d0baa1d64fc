"""The sinks, and which of them the settings ask for. A sink's library is imported when it opens, never here.

Those that everybody knows have a setting each. A sink of one file has none: the setting `sinks` names it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from importlib import metadata
from typing import Any

from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError
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


GROUP = "resilience_sdk.sinks"
"""The group of entry points, by which an installed package offers `name = module:Class`."""


def named_sinks(settings: Settings, place: TelemetryOrigin, failed: Callable[[str, Exception], None]) -> list[Sink]:
    """Return the sinks that the setting `sinks` names, each made with its address, not yet open.

    `failed` is told of what is not to be had, by its name; the others are returned all the same.
    """
    made: list[Sink] = []
    for name, address in (settings.sinks or {}).items():
        try:
            sink = _class_of(name)(place, address)
            sink.name = getattr(sink, "name", name)
            made.append(sink)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code, and the other sinks go on
            failed(name, error)
    return made


def find_unknown(settings: Settings) -> list[str]:
    """Return what is wrong with the names in the setting `sinks`, a sentence each. Imports nothing that they name."""
    told = []
    for name in settings.sinks or {}:
        module = name.partition(":")[0]
        if ":" not in name and name not in _known_names():
            told.append(_no_such_sink(name))
        elif ":" in name and importlib.util.find_spec(module.partition(".")[0] or " ") is None:
            told.append(
                f"sinks: there is no module {module!r} for {name!r}; install it, or name its place in PYTHONPATH"
            )
    return told


def _known_names() -> set[str]:
    own = {module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)} - {"base"}
    return own | {point.name for point in metadata.entry_points(group=GROUP)}


def _no_such_sink(name: str) -> str:
    known = ", ".join(sorted(_known_names()))
    return f"sinks: there is no sink {name!r}; there are {known}, and yours as `module:Class`"


def _class_of(name: str) -> Callable[[TelemetryOrigin, str], Sink]:
    """Return the class of a sink: `module:Class`, that of an installed package, or that of a module here."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _checked(getattr(importlib.import_module(module), attribute), name)
    offered = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name in offered:
        return _checked(offered[name].load(), name)
    if name not in _known_names():
        raise ConfigError(_no_such_sink(name))
    module_of = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    classes = [each for each in vars(module_of).values() if getattr(each, "__module__", "") == module_of.__name__]
    return _checked(next((each for each in classes if isinstance(each, type) and issubclass(each, Sink)), None), name)


def _checked(kind: Any, name: str) -> Callable[[TelemetryOrigin, str], Sink]:
    if not (isinstance(kind, type) and issubclass(kind, Sink)):
        raise ConfigError(
            f"sinks: {name!r} is {kind!r}; expected a class below resilience_sdk.telemetry.sinks.base.Sink"
        )
    return kind
