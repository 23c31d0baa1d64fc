"""`RUN_DIR/stragglers/`.

Reports and verdicts that the monitor publishes, and settings that may be changed while a job runs.

    verdicts.json   what stands now, and the last changes
    report.json     the newest report
    settings.json   written by a person or `resilience straggler`: read, never written, by the monitor
    logged-by-rank  the attempt in which a rank logs the reports, so that the monitor need not print them

A file counts only if we or root own it and nobody else can write it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import Version, version_of, write_whole
from resilience_sdk.core.json_records import from_text, to_text
from resilience_sdk.core.plain_file import NotAPlainFileError, open_plain, report_other_kind
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.fields import nearest, read_value
from resilience_sdk.errors import ConfigError
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import Change, SlowVerdict
from resilience_sdk.system import same_device

DIRECTORY = "stragglers"
VERDICTS, REPORT, SETTINGS = "verdicts.json", "report.json", "settings.json"
LOGGED = "logged-by-rank"
CHANGES_KEPT = 64
_MOST_BYTES = 64 << 20  # a report on 16,384 ranks has some megabytes

"""What tells one content of a file from the next."""


@attrs.frozen
class StandingVerdicts:
    """`verdicts.json`."""

    attempt: int
    at: float
    """Unix seconds of the host that wrote it."""
    enabled: bool = True
    verdicts: tuple[SlowVerdict, ...] = ()
    changes: tuple[Change, ...] = ()
    job: str = ""
    """The key of the job, as in the journal."""


def write_standing(run_dir: Path, standing: StandingVerdicts) -> None:
    """Publish the verdicts; raises OSError."""
    write_whole(_made(run_dir) / VERDICTS, to_text(standing) + "\n")


def remove_standing(run_dir: Path) -> None:
    """Withdraw what an earlier start of the job has published; raises OSError."""
    (run_dir / DIRECTORY / VERDICTS).unlink(missing_ok=True)


def write_report(run_dir: Path, report: Report) -> None:
    """Publish a report; raises OSError."""
    write_whole(_made(run_dir) / REPORT, report.to_json() + "\n")


def read_settings(run_dir: Path) -> str | None:
    """Return what is set while the job runs; None where nothing is. Raises PermissionError where it does not count."""
    return trusted_text(run_dir / DIRECTORY / SETTINGS)


def write_settings(run_dir: Path, text: str) -> None:
    """Set something while the job runs; raises OSError."""
    write_whole(_made(run_dir) / SETTINGS, text)


def remove_settings(run_dir: Path) -> None:
    """Go back to what the job was started with; raises OSError."""
    (run_dir / DIRECTORY / SETTINGS).unlink(missing_ok=True)


def note_logging(run_dir: Path, job: str, attempt: int) -> None:
    """Note that a rank of this attempt logs the reports from now on; raises OSError."""
    write_whole(_made(run_dir) / LOGGED, f"{job} {attempt}\n")


def note_no_logging(run_dir: Path) -> None:
    """Take that back; raises OSError."""
    (run_dir / DIRECTORY / LOGGED).unlink(missing_ok=True)


def is_logging(run_dir: Path, job: str, attempt: int) -> bool:
    """Tell whether a rank of this attempt logs the reports."""
    try:
        return trusted_text(run_dir / DIRECTORY / LOGGED) == f"{job} {attempt}\n"
    except PermissionError:
        return False


def read_standing(run_dir: Path) -> StandingVerdicts | None:
    """Return the newest verdicts; None where there are none that count."""
    text = trusted_text(run_dir / DIRECTORY / VERDICTS)
    return None if text is None else from_text(StandingVerdicts, text)


def read_report(run_dir: Path) -> Report | None:
    """Return the newest report; None where there is none that counts."""
    text = trusted_text(run_dir / DIRECTORY / REPORT)
    return None if text is None else Report.from_json(text)


def trusted_text(path: Path) -> str | None:
    """Return the content of a file that we or root own and nobody else can write; None where there is none.

    Raises PermissionError for one that is somebody else's: a person may have meant well.
    """
    try:
        fd = open_plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    except NotAPlainFileError as error:
        report_other_kind(error)
        return None
    except OSError:
        return None
    with open(fd, encoding="utf-8", errors="replace") as file:
        try:
            info = os.fstat(fd)
            is_readable = info.st_size <= _MOST_BYTES
            text = file.read(_MOST_BYTES) if is_readable else None
        except OSError:  # of a file system over the network: the file was replaced on another host
            return None
    if text is not None and (info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022):
        raise PermissionError(f"{path} belongs to somebody else, or others can write it: chmod go-w, or write it anew")
    return text


def _made(run_dir: Path) -> Path:
    directory = run_dir / DIRECTORY
    same_device.check(directory)
    if not directory.is_dir():
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mode = os.stat(run_dir).st_mode & 0o055 | 0o700
            os.fchmod(fd, mode & 0o750)
        finally:
            os.close(fd)
    return directory


FIELDS = (
    "straggler_detection",
    "report_interval",
    "relative_threshold",
    "individual_threshold",
    "scores_to_print",
    "stop_if_detected",
    "stop_below_relative",
    "stop_below_individual",
)


def controlled(settings: Settings) -> dict[str, Any]:
    """Return the settings that may be changed while the job runs."""
    return {name: getattr(settings, name) for name in FIELDS}


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
        self._start = settings
        self._seen: Version | None = None
        self.now = settings
        """The settings that hold now."""

    def look(self) -> str | None:
        """Look for a change; return what is to be said about it, None = nothing. Costs a stat."""
        found = version_of(self._path)
        if found == self._seen:
            return None
        self._seen = found
        before = self.now
        try:
            text = None if found is None else read_settings(self._run_dir)
            self.now = self._start if text is None else attrs.evolve(self._start, **values_of(text, str(self._path)))
        except (ConfigError, PermissionError) as error:
            return f"straggler settings stay as they are: {error}"
        changed = controlled(self.now).items() - controlled(before).items()
        news = [f"{name} = {shown(value)}" for name, value in controlled(self.now).items() if (name, value) in changed]
        return f"straggler settings changed: {', '.join(news)}" if news else None
