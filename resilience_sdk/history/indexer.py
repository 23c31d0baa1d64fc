"""The indexer: takes what is new in the journals of run directories into the index, as often as it is asked.

Each step is one transaction that reads how far the files of some runs were taken, adds their rows and moves that on.
So it may be killed at any moment, and others may index the same runs at the same time: the row of a run is what they
wait for. A step has some megabytes of lines, or a thousand files: what is slow is a transaction, not a line.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from resilience_sdk.core.console import doing
from resilience_sdk.core.journal import parse_lines
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.errors import ConfigError
from resilience_sdk.history.facts import Rows
from resilience_sdk.history.schema import Tables, first_of, open_engine, prepare

if TYPE_CHECKING:
    from sqlalchemy import Connection, Executable, Table

_CHUNK_BYTES = 4 << 20
_LONGEST_LINE_BYTES = 1 << 26
_HEAD_BYTES = 1 << 12
_LEAST_BYTES = 1 << 12  # as which a run, and a file, is counted: a step does not look at too many of them


@attrs.frozen
class Indexed:
    """What one pass has done."""

    runs: int = 0
    events: int = 0
    torn: int = 0
    problems: tuple[str, ...] = ()


NO_RUN = "is no run directory and has none in it"


def run_directories(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """Return the run directories among `folders` and right below them, and what is none of either."""
    found: dict[str, None] = {}
    problems: list[str] = []
    for folder in map(Path, folders):
        below = [folder] if _has_journal(folder, problems) else []
        if not below and folder.is_dir():
            try:
                below = sorted(one for one in folder.iterdir() if _has_journal(one, problems))
            except OSError as error:
                problems.append(f"{folder}: {error.strerror}")
        if not below:
            problems.append(f"{folder} {NO_RUN}")
        found.update(dict.fromkeys(os.path.realpath(one) for one in below))
    return [Path(path) for path in found], problems


def _has_journal(directory: Path, problems: list[str]) -> bool:
    """Tell whether a directory is that of a run; one of somebody else, which cannot be looked into, is a problem."""
    try:
        return (directory / "journal").is_dir()
    except OSError as error:
        problems.append(f"{directory}: {error.strerror}")
        return False


class Index:
    """The index in one database. One thread at a time."""

    def __init__(self, named: str) -> None:
        """Open the database and make what it lacks; raises ConfigError and MissingExtraError."""
        self._called = redact_text(named)
        self.engine = open_engine(named)  # first: it says so where SQLAlchemy is missing
        self.tables = Tables()
        from sqlalchemy.exc import DBAPIError

        try:
            prepare(self.engine, self.tables)
            self._writes, self._mark = self._make_writes(), self._make_mark()
        except DBAPIError as error:
            self.close()
            raise ConfigError(f"the history {self._called} cannot be opened: {str(error.orig).strip()}") from None
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the database."""
        self.engine.dispose()

    def add(self, folders: Sequence[str | os.PathLike[str]], *, host_prefix: str = "") -> Indexed:
        """Take in what is new in these run directories; `host_prefix` of the names of files leaves out the others.

        And all that there is of runs that an index of another version had, until somebody has taken them in.

        Raises ConfigError where the database does not answer; a directory that cannot be read is told as a problem.
        """
        from sqlalchemy.exc import DBAPIError

        asked, problems = run_directories(folders)
        ours = set(asked)
        events = torn = 0
        try:
            again, _ = run_directories(path for path in self._untaken() if os.path.isdir(path))
            # All indexers take runs in one order: two that hold several each could wait for one another for ever.
            directories = sorted({*asked, *again})
            waiting = deque(_RunFiles(one, host_prefix if one in ours else "") for one in directories)
            while waiting:
                step = _Step(_CHUNK_BYTES)
                with self.engine.begin() as connection:
                    while waiting and step.left > 0:
                        doing("taking in runs:", len(directories) - len(waiting) + 1, len(directories))
                        try:
                            is_all = self._take(connection, waiting[0], step)
                        except OSError as error:
                            problems.append(f"{waiting[0].directory}: {error.strerror}")
                            is_all = True
                        if not is_all:
                            break  # how far its files were read is known when this step is written
                        waiting.popleft()
                    for kind, rows in step.rows.items():
                        connection.execute(self._writes[kind], rows)
                    for run in {row["run"] for kind in ("failures", "strikes") for row in step.rows.get(kind, ())}:
                        connection.execute(self._mark, {"of_run": run})
                events, torn = events + step.events, torn + step.torn
        except DBAPIError as error:
            raise ConfigError(f"the history {self._called} does not answer: {str(error.orig).strip()}") from None
        return Indexed(len(directories), events, torn, tuple(problems))

    def _untaken(self) -> Sequence[str]:
        """Return the runs of which an index of another version has left nothing but their paths."""
        from sqlalchemy import select

        with self.engine.begin() as connection:
            return (
                connection.execute(select(self.tables.runs.c.path).where(self.tables.runs.c.is_untaken)).scalars().all()
            )

    def _take(self, connection: Connection, files: _RunFiles, step: _Step) -> bool:
        """Read what is new in a run, as far as the step goes; return whether that was all."""
        from sqlalchemy import update

        runs = self.tables.runs
        run, is_untaken, places = self._run_of(connection, files)
        step.left -= _LEAST_BYTES
        # What nobody has written to since is not waited for.
        if not all(name in places and places[name].is_at(*seen) for name, seen in files.seen.items()):
            connection.execute(update(runs).where(runs.c.id == run).values(turn=1 - runs.c.turn))  # others wait here
            if not self._take_files(connection, run, files, step):
                return False
        if is_untaken and not files.host_prefix:
            connection.execute(update(runs).where(runs.c.id == run).values(is_untaken=False))
        return True

    def _take_files(self, connection: Connection, run: int, files: _RunFiles, step: _Step) -> bool:
        places, rows = self._places(connection, run), Rows()
        journal = files.directory / "journal"
        try:
            for name, (head, _) in files.seen.items():
                if step.left <= 0 and step.rows.get("files"):  # a step that came to nothing would come again
                    return False
                if not self._take_file(connection, run, journal / name, head, places.get(name), rows, step):
                    return False
            return True
        finally:
            step.add(run, rows)  # also where a file cannot be read: the places of those before it are noted

    def _run_of(self, connection: Connection, files: _RunFiles) -> tuple[int, bool, dict[str, _Place]]:
        """Return the run's row, whether it is still to be taken in again, and how far each file was taken.

        A new row where the name is used again, so that no file of then is there any more.
        """
        from sqlalchemy import select

        runs, path = self.tables.runs, str(files.directory)
        newest = select(runs.c.id, runs.c.generation, runs.c.is_untaken).where(runs.c.path == path)
        newest = newest.order_by(runs.c.generation.desc()).limit(1)
        row = connection.execute(newest).first()
        generation = 0
        if row is not None:
            places = self._places(connection, row.id)
            ours = {name: place for name, place in places.items() if name.startswith(files.host_prefix)}
            same = any(name in files.seen and files.seen[name][0] == place.head for name, place in ours.items())
            if not files.seen or not ours or same:
                return int(row.id), bool(row.is_untaken), places
            generation = row.generation + 1
        connection.execute(self._writes["new run"], first_of(path, generation))
        return int(connection.execute(newest).one().id), False, {}

    def _places(self, connection: Connection, run: int) -> dict[str, _Place]:
        """Return how far the run's files have been taken."""
        from sqlalchemy import select

        files = self.tables.files
        known = select(files.c.name, files.c.head, files.c.read_to, files.c.torn).where(files.c.run == run)
        return {name: _Place(head, int(to), int(torn)) for name, head, to, torn in connection.execute(known)}

    def _take_file(
        self, connection: Connection, run: int, path: Path, head: str, place: _Place | None, rows: Rows, step: _Step
    ) -> bool:
        """Read what is new in a file, as far as the step goes; return whether that was all."""
        from sqlalchemy import delete

        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if place is not None and (place.head != head or size < place.read_to):
                # Another file has the name, or it was cut: what it has told is told again.
                retold = (self.tables.starts, self.tables.attempts, self.tables.strikes, self.tables.findings)
                for table in retold:
                    connection.execute(delete(table).where((table.c.run == run) & (table.c.file == path.name)))
                place = None
            place = place or _Place(head, 0, 0)
            data, is_all = _whole_lines(file, place.read_to, max(step.left, _LEAST_BYTES))
        if data:
            rows.file, torn = path.name, 0
            for event, offset in _events(data, place.read_to):
                if event is None:
                    torn += 1
                else:
                    rows.add(event, offset)
            step.move_on(run, path.name, _Place(head, place.read_to + len(data), place.torn + torn), len(data))
            step.torn += torn
        return is_all

    def _make_writes(self) -> dict[str, Executable]:
        """Return the statement for each kind of rows, which runs once for each of them, in the order of the steps."""
        from sqlalchemy import Boolean, Float, bindparam, case, func, or_, update

        tables, runs, attempts = self.tables, self.tables.runs, self.tables.attempts

        def merged(new: Any) -> dict[str, Any]:
            began = case((attempts.c.began_at < new.began_at, attempts.c.began_at), else_=new.began_at)
            ended = case((attempts.c.ended_at > new.ended_at, attempts.c.ended_at), else_=new.ended_at)
            values = {name: new[name] for name in ("world_size", "nodes", "node", "alias")}
            values |= {"began_at": began, "ended_at": ended}
            return {name: func.coalesce(value, attempts.c[name]) for name, value in values.items()}

        first, last = bindparam("first", type_=Float), bindparam("last", type_=Float)
        return {
            "files": self._upsert(tables.files, ("head", "read_to", "torn")),
            "starts": self._upsert(tables.starts, ("facts",)),
            "attempts": self._upsert(attempts, merged),
            "failures": self._upsert(
                tables.failures, ("at", "kind", "category", "cause", "action", "confidence", "signature", "nodes",
                 "injected")
            ),
            "culprits": self._upsert(tables.culprits, ()),
            "strikes": self._upsert(tables.strikes, ()),
            "recoveries": self._upsert(tables.recoveries, ("recovery_s", "lost_steps")),
            "findings": self._upsert(tables.findings, ()),
            "new run": self._upsert(runs, (), ("path", "generation")),
            "runs": update(runs).where(runs.c.id == bindparam("of_run")).values(
                first_at=case((runs.c.first_at < first, runs.c.first_at), else_=first),
                last_at=case((runs.c.last_at > last, runs.c.last_at), else_=last),
                events=runs.c.events + bindparam("more"),
                launched=or_(runs.c.launched, bindparam("is_launched", type_=Boolean)),
            ),
        }  # fmt: skip

    def _make_mark(self) -> Executable:
        """Return what marks a run's failures that do not tell whether a fault had been injected, and one had."""
        from sqlalchemy import bindparam, exists, update

        failures, strikes = self.tables.failures, self.tables.strikes
        struck = exists().where(
            strikes.c.run == failures.c.run,
            strikes.c.job == failures.c.job,
            strikes.c.attempt == failures.c.attempt,
        )
        told_nothing = (failures.c.run == bindparam("of_run")) & failures.c.injected.is_(None)
        return update(failures).where(told_nothing & struck).values(injected=True)

    def _upsert(
        self, table: Table, changes: Sequence[str] | Callable[[Any], dict[str, Any]], keys: Sequence[str] = ()
    ) -> Executable:
        """Return how a row is inserted; of one that is there, these columns take the new value, or `changes` says."""
        if self.engine.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert
        else:
            from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
        statement, keys = insert(table), keys or [column.name for column in table.primary_key]
        new = statement.excluded
        values = changes(new) if callable(changes) else {name: new[name] for name in changes}
        if values:
            return statement.on_conflict_do_update(index_elements=keys, set_=values)
        return statement.on_conflict_do_nothing(index_elements=keys)


@attrs.frozen
class _Place:
    """How far one file was taken: a sum of its first line, an offset, and the torn lines up to there."""

    head: str
    read_to: int
    torn: int

    def is_at(self, head: str, size: int) -> bool:
        """Tell whether nothing of a file that looks like that is left."""
        return (self.head, self.read_to) == (head, size)


@attrs.define(slots=False)  # for the cached property
class _RunFiles:
    """A run directory whose turn comes. `seen`: of each file a sum of its first line, and its size."""

    directory: Path
    host_prefix: str

    @cached_property
    def seen(self) -> dict[str, tuple[str, int]]:
        """Look once: what is written after that may wait for the next pass. Raises OSError."""
        journal = self.directory / "journal"
        names = sorted(n for n in os.listdir(journal) if n.endswith(".jsonl") and n.startswith(self.host_prefix))
        return {name: seen for name in names if _is_text(name) and (seen := _look(journal / name)) is not None}


@attrs.define
class _Step:
    """What one transaction adds: rows by what they are written with, until `left` bytes are read."""

    left: int
    events: int = 0
    torn: int = 0
    rows: dict[str, list[dict[str, Any]]] = attrs.field(factory=lambda: defaultdict(list))

    def move_on(self, run: int, name: str, place: _Place, read: int) -> None:
        """Note how far a file is taken now."""
        self.left -= max(read, _LEAST_BYTES)
        self.rows["files"].append({"run": run, "name": name, **attrs.asdict(place)})

    def add(self, run: int, rows: Rows) -> None:
        """Take what a run has told."""
        for kind, found in rows.by_table.items():
            if found:
                self.rows[kind] += [{"run": run, **row} for row in found.values()]
        if rows.events:
            told = {"first": rows.first_at, "last": rows.last_at, "is_launched": rows.launched}
            self.rows["runs"].append({"of_run": run, "more": rows.events, **told})
        self.events += rows.events


def _events(data: bytes, offset: int) -> Iterator[tuple[dict[str, Any] | None, int]]:
    for line in data.splitlines(keepends=True):
        offset += len(line)
        for event in parse_lines(line):
            yield event, offset


def _is_text(name: str) -> bool:
    """Tell whether a database takes a name: one of bytes that are no UTF-8 is nothing that we have written."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _look(path: Path) -> tuple[str, int] | None:
    """Return a sum over a file's first line, and its size; None before there is a line, or where the file is gone."""
    try:
        with open_to_read(path) as file:
            first, size = file.readline(_HEAD_BYTES), os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if not first.endswith(b"\n") and len(first) < _HEAD_BYTES:
        return None
    return hashlib.sha256(first).hexdigest()[:32], size


def _whole_lines(file: BinaryIO, offset: int, length: int) -> tuple[bytes, bool]:
    """Return the next whole lines of a file, about `length` bytes of them, and whether there are no more.

    What stands behind the last one is being written.
    """
    while True:
        file.seek(offset)
        data = file.read(length)
        is_all = len(data) < length
        if end := data.rfind(b"\n") + 1:
            return data[:end], is_all
        if is_all or length >= _LONGEST_LINE_BYTES:
            return (b"" if is_all else data), is_all
        length *= 4
