"""`RUN_DIR/stragglers/`: what the monitor publishes about slow ranks, and what a person may set while the job runs.

    verdicts.json   what stands now, and the last changes
    report.json     the newest report
    settings.json   written by a person or `resilience straggler`: read, never written, by the monitor
    logged-by-rank  the attempt in which a rank logs the reports, so that the monitor need not print them

A file counts only if we or root own it and nobody else can write it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import attrs

from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import Change, Verdict
from resilience_sdk.whole_file import write_whole
from resilience_sdk.wire import from_text, to_text

DIRECTORY = "stragglers"
VERDICTS, REPORT, SETTINGS = "verdicts.json", "report.json", "settings.json"
LOGGED = "logged-by-rank"
CHANGES_KEPT = 64
_MOST_BYTES = 64 << 20  # a report on 16,384 ranks has some megabytes

Seen = tuple[int, int, int]
"""What tells one content of a file from the next."""


@attrs.frozen
class Numbered:
    """A change with its number in the attempt, from 1."""

    number: int
    what: str
    verdict: Verdict

    @property
    def change(self) -> Change:
        """The change itself."""
        return Change(self.what, self.verdict)


@attrs.frozen
class Standing:
    """`verdicts.json`."""

    attempt: int
    at: float
    """Unix seconds of the host that wrote it."""
    enabled: bool = True
    verdicts: tuple[Verdict, ...] = ()
    changes: tuple[Numbered, ...] = ()
    job: str = ""
    """The key of the job, as in the journal."""

    @property
    def newest(self) -> int:
        """Number of the newest change."""
        return self.changes[-1].number if self.changes else 0

    def after(self, number: int) -> list[Numbered]:
        """Return the changes after that number."""
        return [change for change in self.changes if change.number > number]


def write_standing(run_dir: Path, standing: Standing) -> None:
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


def read_standing(run_dir: Path) -> Standing | None:
    """Return the newest verdicts; None where there are none that count."""
    text = trusted_text(run_dir / DIRECTORY / VERDICTS)
    return None if text is None else from_text(Standing, text)


def read_report(run_dir: Path) -> Report | None:
    """Return the newest report; None where there is none that counts."""
    text = trusted_text(run_dir / DIRECTORY / REPORT)
    return None if text is None else Report.from_json(text)


def seen(path: Path) -> Seen | None:
    """Return what changes when the file is written; None where there is none."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def trusted_text(path: Path) -> str | None:
    """Return the content of a file that we or root own and nobody else can write; None where there is none.

    Raises PermissionError for one that is somebody else's: a person may have meant well.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, encoding="utf-8", errors="replace") as file:
        try:
            info = os.fstat(fd)
            text = file.read(_MOST_BYTES) if _is_readable(info) else None
        except OSError:  # of a file system over the network: the file was replaced on another host
            return None
    if text is not None and (info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022):
        raise PermissionError(f"{path} belongs to somebody else, or others can write it: chmod go-w, or write it anew")
    return text


def _is_readable(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_size <= _MOST_BYTES


def _made(run_dir: Path) -> Path:
    directory = run_dir / DIRECTORY
    if not directory.is_dir():
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mode = os.stat(run_dir).st_mode & 0o055 | 0o700
            os.fchmod(fd, mode & 0o750)
        finally:
            os.close(fd)
    return directory
