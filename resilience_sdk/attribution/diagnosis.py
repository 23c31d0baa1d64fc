"""`attribution.diagnose`: one verdict from a log, an exception or a run directory. Does the I/O of attribution."""

from __future__ import annotations

import gzip
import io
import os
import re
import traceback
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from resilience_sdk.attribution.exits import classify_exit
from resilience_sdk.attribution.log_reader import LogReader
from resilience_sdk.attribution.log_scan import scan
from resilience_sdk.attribution.merging import judge_together
from resilience_sdk.attribution.root_cause import find_root
from resilience_sdk.attribution.sightings import LogFacts
from resilience_sdk.attribution.verdict import Quote, Suspect, Verdict, verdict
from resilience_sdk.errors import ConfigError
from resilience_sdk.incidents import Incident, IncidentStore

Source = str | os.PathLike[str] | bytes | BaseException | BinaryIO
_GZIP = b"\x1f\x8b"
_LONGEST_PATH = 4096
_RANK_OF_FILE = re.compile(r"(?i)(?:\b|_)rank[_-]?(\d{1,6})[^/]*$|/attempt_\d+/(\d{1,6})/std(?:out|err)\.log$")


def diagnose(source: Source) -> Verdict:
    """Say what went wrong: cause, whom the evidence names, what to do next, and the lines that say so.

    Args:
        source: The path of a log (also gzip), its text, an open binary file; an exception; or a run directory,
            whose newest incident is given back. A string without a line break is a path where there is such a
            file, else text.

    Raises:
        ConfigError: The file cannot be read, or the directory is no run directory.
    """
    if isinstance(source, BaseException):
        return _of_exception(source)
    if isinstance(source, bytes):
        return diagnose_stream(io.BytesIO(source), "text")
    if isinstance(source, (str, os.PathLike)):
        path = _as_path(source)
        if path is None:
            return diagnose_stream(io.BytesIO(str(source).encode("utf-8", "replace")), "text")
        return _of_run_directory(path) if path.is_dir() else diagnose_file(path)
    return diagnose_stream(source, getattr(source, "name", "stream"))


def diagnose_file(path: Path) -> Verdict:
    """Diagnose one log file, compressed or not. Raises ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return diagnose_stream(file, str(path), rank_of(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def diagnose_stream(stream: BinaryIO, name: str, rank: int | None = None) -> Verdict:
    """Diagnose what a stream holds, read once from where it stands; memory is bounded whatever its length.

    `rank`: who wrote it, where one rank alone did.
    """
    return find_root(_facts(stream, name, rank))


def diagnose_ranks(paths: Sequence[Path]) -> Verdict:
    """Diagnose the log files of one job's ranks together, each named for its rank (`rank_of`).

    Raises ConfigError when one cannot be read.
    """
    logs = []
    for path in paths:
        try:
            with path.open("rb") as file:
                logs.append(_facts(file, str(path), rank_of(path)))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    return judge_together(logs, [rank_of(path) for path in paths])


def _facts(stream: BinaryIO, name: str, rank: int | None) -> LogFacts:
    reader = LogReader(name, rank)
    scan(_unzipped(stream), reader)
    return reader.facts()


def rank_of(path: Path) -> int | None:
    """Return the rank whose log a file is by its name: `rank3.log`, `rank_3.err`, torchrun's `.../3/stderr.log`."""
    match = _RANK_OF_FILE.search(path.as_posix())
    return int(next(group for group in match.groups() if group)) if match else None


def job_of(path: Path) -> Path | None:
    """Return what the files of one attempt's ranks have in common by their names; None for a file of no rank."""
    match = _RANK_OF_FILE.search(path.as_posix())
    if match is None:
        return None
    return path.parent if match.group(1) else path.parent.parent  # torchrun's `attempt_0/3/stderr.log`


def logs_below(directory: Path) -> Iterator[Path]:
    """Yield the files of a directory, in the order of their names; links and hidden files are left out."""
    for path in sorted(directory.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if path.is_file() and not path.is_symlink() and not hidden:
            yield path


def is_run_directory(path: Path) -> bool:
    """Tell whether a directory is one that a run of ours wrote."""
    return (path / "journal").is_dir() or (path / "incidents").is_dir()


def _as_path(source: str | os.PathLike[str]) -> Path | None:
    if isinstance(source, str) and ("\n" in source or len(source) > _LONGEST_PATH or "\0" in source):
        return None
    path = Path(source)
    return path if isinstance(source, os.PathLike) or os.path.exists(path) else None


def _of_exception(error: BaseException) -> Verdict:
    frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)][::-1]
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    found = classify_exit(None, {"type": name, "message": str(error), "frames": frames})
    evidence = tuple(Quote(quoted.source, None, quoted.text) for quoted in found.evidence if quoted.source != "exit")
    return Verdict(
        found.category, found.cause, found.action, found.confidence, (Suspect(stack=tuple(frames)),), evidence
    )


def _of_run_directory(path: Path) -> Verdict:
    if not is_run_directory(path):
        raise ConfigError(f"{path} is no run directory; give the log files in it, or `resilience diagnose {path}`")
    try:
        incidents = IncidentStore(path).all()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if incidents:
        return _of_incident(incidents[-1])
    told = "the finished flag is there" if (path / "finished").exists() else "no incident is on record"
    cause = "no_fault" if (path / "finished").exists() else "unknown"
    return verdict(cause, 0.9 if cause == "no_fault" else 0.1, (), (Quote(str(path), None, told),))


def _of_incident(incident: Incident) -> Verdict:
    culprits = tuple(Suspect(c.rank, c.node, c.step, c.section, c.stack) for c in incident.culprits)
    evidence = tuple(Quote(e.source, None, e.text) for e in incident.evidence)
    return Verdict(
        incident.category or "unknown",
        incident.cause or "unknown",
        incident.action or "restart",
        incident.confidence or 0.0,
        culprits,
        evidence,
    )


def _unzipped(stream: BinaryIO) -> BinaryIO:
    buffered: Any = stream if hasattr(stream, "peek") else io.BufferedReader(cast(io.RawIOBase, stream))
    if buffered.peek(2)[:2] != _GZIP:
        return cast(BinaryIO, buffered)
    return cast(BinaryIO, _Gunzip(gzip.GzipFile(fileobj=buffered)))


class _Gunzip:
    """Reads a gzip stream; one that is cut short or damaged ends where it can no longer be read."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, empty at the end."""
        try:
            return self._file.read1(size)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b""
