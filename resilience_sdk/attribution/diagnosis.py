"""`attribution.diagnose`: one verdict from a log, an exception or a run directory, and from the ends of logs.

The same reader and the same rules as `diagnose`, on the last part of a log, so that it takes a fraction of a second.

Clocks order lines of different files where the lines have any; a line without one belongs to the moment of the last
before it in its file. Where no file has clocks, only what a file says of itself has an order, which is still enough to
tell those who failed from those who merely lost them.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import attrs

from resilience_sdk.attribution.exits import Classification, classification, classify_exit
from resilience_sdk.attribution.log_facts import LogFacts, Quote, Sighting, Suspect, Verdict, verdict
from resilience_sdk.attribution.log_reader import LogReader
from resilience_sdk.attribution.log_scan import scan
from resilience_sdk.attribution.log_signs import is_xid, read_line
from resilience_sdk.attribution.root_cause import find_root
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.attribution.tracebacks import Stack
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.errors import ConfigError
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.incidents.record import Evidence

MOST_BYTES = 64 << 10
"""How much of the end of a log is read: hundreds of lines, a tenth of a second at worst."""
_NOTHING = frozenset({"unknown", "no_fault"})
_MOST_QUOTED = 3
_MOST_KERNEL_LINES = 5000
_OOM = "host_oom_kill"
# How the kernel names a process: `Killed process 71 (python)`, `python[71]: segfault at 0`, `Xid ...: 31, pid=71`.
_PROCESS = re.compile(r"(?:[Kk]illed|reaped) process (\d+)\b|\w\[(\d+)\]: |\bpid[= ](\d+)\b")


@attrs.frozen
class KernelFindings:
    """What the kernel's log says: of the processes that were asked for, and of the node as a whole."""

    processes: Mapping[int, tuple[Classification, ...]] = attrs.field(factory=dict)
    node: tuple[Classification, ...] = ()


@attrs.frozen
class LogFindings:
    """What the end of a log says. `ranks`: whom it says it of; empty where its lines name nobody."""

    known: Classification
    ranks: frozenset[int] = frozenset()


def read_tail(data: bytes, name: str, rank: int | None = None) -> LogFindings | None:
    """Return what the last part of a log says, None where it tells of no fault.

    `rank`: who wrote it, where one rank alone did.
    """
    reader = LogReader(name, rank)
    scan(io.BytesIO(data[-MOST_BYTES:]), reader)
    facts = reader.facts()
    found = find_root(facts)
    if found.cause in _NOTHING or not any(sighting.cause == found.cause for sighting in facts.sightings):
        return None
    roles = {sighting.role for sighting in facts.sightings if sighting.cause == found.cause}
    quoted = tuple(Evidence(name, quote.text) for quote in found.evidence[:_MOST_QUOTED])
    known = classification(found.cause, found.confidence, *quoted, symptom=roles <= {"symptom"})
    known = attrs.evolve(known, action=found.action)  # not always the cause's own: see `sightings.hearsay`
    return LogFindings(known, frozenset(who.rank for who in found.culprits if who.rank is not None))


def read_kernel(lines: Iterable[str], pids: Iterable[int], *, oom_seen: bool | None) -> KernelFindings:
    """Return what the messages of the kernel and its drivers say about these processes and about the node.

    `pids`: of the job's processes, as the kernel numbers them. `oom_seen`: whether the job's control group counted a
    kill for memory: seen from inside a container, that count alone tells that a kill for memory was of this job.
    """
    ours = frozenset(pids)
    processes: dict[int, list[Classification]] = {}
    node: dict[str, Classification] = {}
    for _, text in zip(range(_MOST_KERNEL_LINES), lines, strict=False):
        reading = read_line(text)
        if reading is None or reading.role != "proof":
            continue
        told = Evidence("kernel", text.strip()[:500])
        found = classification(reading.cause, reading.confidence, told, measured=True)
        named = {int(next(filter(None, groups))) for groups in _PROCESS.findall(text)}
        for pid in named & ours:
            processes.setdefault(pid, []).append(found)
        # A kill for memory is of the killed process alone, and not every line of it says which that is. What a GPU
        # reports of itself concerns everybody on it: its line names whichever process it met.
        if reading.cause == _OOM:
            is_of_node = bool(oom_seen) and not named & ours
        else:
            is_of_node = not named or (is_xid(text) and lookup(reading.cause).category == "hardware")
        if is_of_node:
            node.setdefault(reading.cause, found)
    return KernelFindings({pid: tuple(found) for pid, found in processes.items()}, tuple(node.values()))


_Numbered = tuple[int, str]


@attrs.frozen
class _Place:
    """A line of one of the logs."""

    log: int
    line: int


def judge_together(logs: Sequence[LogFacts], ranks: Sequence[int | None]) -> Verdict:
    """Return one verdict on the logs of several ranks of one job; evidence is quoted from the log it stands in.

    `ranks`: who wrote each of them. One who wrote of no trouble is among those whom the others may have missed.
    """
    order = _order(logs)
    numbers = {place: number for number, place in enumerate(order, 1)}
    merged = _merge(logs, numbers)
    for log, (facts, rank) in enumerate(zip(logs, ranks, strict=True)):
        if rank is not None and rank not in merged.said and facts.last is not None:
            merged.said[rank] = numbers[_Place(log, facts.last[0])], facts.last[1]
    known = [rank for rank in ranks if rank is not None]
    if merged.world is None and known:
        merged = attrs.evolve(merged, world=max(known) + 1)
    found = find_root(merged)
    return attrs.evolve(found, evidence=tuple(_located(quoted, order, logs) for quoted in found.evidence))


def _moved(stacks: Sequence[Stack], log: int, numbers: dict[_Place, int], behind: int) -> Iterator[Stack]:
    for stack in stacks:
        yield attrs.evolve(stack, number=numbers[_Place(log, stack.number)], progress=stack.progress + behind)


def _located(quoted: Quote, order: Sequence[_Place], logs: Sequence[LogFacts]) -> Quote:
    if quoted.line is None:
        return quoted
    place = order[quoted.line - 1]
    return Quote(logs[place.log].name, place.line, quoted.text)


def _order(logs: Sequence[LogFacts]) -> list[_Place]:
    """Return every line that matters, the oldest first as far as clocks tell; each file keeps its own order."""
    timed: list[tuple[float, int, int]] = []
    for log, facts in enumerate(logs):
        clocks = {s.number: s.time_s for s in facts.sightings if s.time_s is not None}
        now = min(clocks.values(), default=0.0)
        for line in sorted(set(_lines(facts))):
            now = max(now, clocks.get(line, now))
            timed.append((now, log, line))
    return [_Place(log, line) for _, log, line in sorted(timed)]


def _lines(facts: LogFacts) -> Iterator[int]:
    for sighting in facts.sightings:
        yield sighting.number
        yield sighting.line
    yield from (end.number for end in facts.exits)
    for number, _ in (*facts.said.values(), *facts.done.values(), *facts.fragments):
        yield number
    yield from (stack.number for stack in facts.stacks)
    yield from (took.number for took in facts.took.values())
    for one in (facts.finished, facts.failed, facts.last):
        if one is not None:
            yield one[0]


def _merge(logs: Sequence[LogFacts], numbers: dict[_Place, int]) -> LogFacts:
    steps = max(facts.progress for facts in logs)
    sightings: list[Sighting] = []
    merged = LogFacts(name="", progress=steps, world=max((facts.world or 0 for facts in logs), default=0) or None)
    finished: list[_Numbered] = []
    failed: list[_Numbered] = []
    last: list[_Numbered] = []
    for log, facts in enumerate(logs):

        def at(one: _Numbered, log: int = log) -> _Numbered:
            return numbers[_Place(log, one[0])], one[1]

        for s in facts.sightings:
            sightings.append(
                attrs.evolve(
                    s,
                    number=numbers[_Place(log, s.number)],
                    quoted=None if s.quoted is None else numbers[_Place(log, s.quoted)],
                    progress=steps - (facts.progress - s.progress),  # what counts is how much came after it
                )
            )
        merged.troubled.update(facts.troubled)
        merged.took.update(
            {rank: attrs.evolve(took, number=numbers[_Place(log, took.number)]) for rank, took in facts.took.items()}
        )
        merged.said.update({rank: at(words) for rank, words in facts.said.items()})
        merged.done.update({rank: at(words) for rank, words in facts.done.items()})
        for kept, one in ((finished, facts.finished), (failed, facts.failed), (last, facts.last)):
            if one is not None:
                kept.append(at(one))
        merged = attrs.evolve(
            merged,
            exits=(*merged.exits, *(attrs.evolve(e, number=numbers[_Place(log, e.number)]) for e in facts.exits)),
            deaf=merged.deaf | facts.deaf,
            stepped=merged.stepped or facts.stepped,
            cut_short=merged.cut_short or facts.cut_short,
            fragments=(*merged.fragments, *map(at, facts.fragments)),
            stacks=(*merged.stacks, *_moved(facts.stacks, log, numbers, steps - facts.progress)),
            ends_well=merged.ends_well or facts.ends_well,
        )
    everyone_finished = len(finished) == len(logs)
    return attrs.evolve(
        merged,
        sightings=tuple(sorted(sightings, key=lambda s: s.number)),
        finished=max(finished) if everyone_finished and finished else None,
        failed=max(failed, default=None),
        last=max(last, default=None),
    )


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
        with _open_log(path) as file:
            return diagnose_stream(file, str(path), rank_of(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _open_log(path: Path) -> BinaryIO:
    """Open a log; also the pipe that a shell has opened for it (`<(kubectl logs pod)`, /dev/stdin), but no FIFO."""
    if os.path.realpath(path).rpartition("/")[2].startswith("pipe:["):  # no name in any directory: it is open here
        return open(path, "rb")
    return open_to_read(path)


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
            with _open_log(path) as file:
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
