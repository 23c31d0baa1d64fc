"""What about stragglers may be changed while a job runs: `RUN_DIR/stragglers/settings.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.errors import ConfigError
from resilience_sdk.settings import Settings
from resilience_sdk.settings.fields import nearest, read_value
from resilience_sdk.straggler.published import DIRECTORY, SETTINGS, Seen, read_settings, seen

FIELDS = (
    "straggler_detection",
    "report_interval",
    "relative_threshold",
    "individual_threshold",
    "scores_to_print",
    "stop_if_detected",
)


@attrs.frozen
class Control:
    """The settings that hold now; names and units are those of `Settings`."""

    straggler_detection: bool
    report_interval: float
    relative_threshold: float
    individual_threshold: float
    scores_to_print: int
    stop_if_detected: bool

    @classmethod
    def of(cls, settings: Settings) -> Control:
        """Return what the settings say."""
        return cls(**{name: getattr(settings, name) for name in FIELDS})


def changed(control: Control, text: str, source: str) -> Control:
    """Return `control` with the values of a JSON object; raises ConfigError for anything else."""
    return attrs.evolve(control, **values_of(text, source))


def values_of(text: str, source: str) -> dict[str, Any]:
    """Return the values in a JSON object, in their canonical form; raises ConfigError."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: it is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f'{source}: expected a JSON object such as {{"relative_threshold": 0.8}}')
    return checked(values, source)


def checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values in their canonical form; raise ConfigError naming what is wrong."""
    for name in values:
        if name not in FIELDS:
            raise ConfigError(f"{source}: {name!r} cannot be changed while the job runs{nearest(name, list(FIELDS))}")
    return {name: read_value(name, value, source=f"{source}, {name}") for name, value in values.items()}


def shown(value: object) -> str:
    """Return a value as a person would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


class ControlFile:
    """The file of one run directory, and what holds because of it."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        """Begin with the settings that the job was started with; they hold again when the file is removed."""
        self._run_dir = run_dir
        self._path = run_dir / DIRECTORY / SETTINGS
        self._start = Control.of(settings)
        self._seen: Seen | None = None
        self.now = self._start

    def look(self) -> str | None:
        """Look for a change; return what is to be said about it, None = nothing. Costs a stat."""
        found = seen(self._path)
        if found == self._seen:
            return None
        self._seen = found
        before = self.now
        try:
            text = None if found is None else read_settings(self._run_dir)
            self.now = self._start if text is None else changed(self._start, text, str(self._path))
        except (ConfigError, PermissionError) as error:
            return f"straggler settings stay as they are: {error}"
        news = [
            f"{name} = {shown(getattr(self.now, name))}"
            for name in FIELDS
            if getattr(self.now, name) != getattr(before, name)
        ]
        return f"straggler settings changed: {', '.join(news)}" if news else None
