"""The indexer: takes what is new in the journals of run directories into the index, as often as it is asked.

Each step is one transaction that reads how far a file was taken, adds its rows and moves that on. So it may be killed
at any moment, and others may index the same runs at the same time: the row of the run is what they wait for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.core.console import doing
from resilience_sdk.core.journal import parse_lines
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.errors import ConfigError
from resilience_sdk.history.facts import Rows
from resilience_sdk.history.schema import Tables, first_of, open_engine, prepare

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

_CHUNK_BYTES = 4 << 20
_LONGEST_LINE_BYTES = 1 << 26
_HEAD_BYTES = 1 << 12
_ROWS_AT_ONCE = 500


@attrs.frozen
class Indexed:
    """What one pass has done."""

    runs: int = 0
    events: int = 0
    torn: int = 0
    problems: tuple[str, ...] = ()


@attrs.frozen
class _Step:
    events: int
    torn: int
    rest: list[tuple[str, str]]


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
            problems.append(f"{folder} is no run directory and has none in it")
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
        events = torn = 0
        try:
            again, _ = run_directories(path for path in self._untaken() if os.path.isdir(path))
            directories = [*asked, *(directory for directory in again if directory not in asked)]
            for number, directory in enumerate(directories):
                doing("taking in runs:", number + 1, len(directories))
                try:
                    one = self._add_run(directory, host_prefix if directory in asked else "")
                except OSError as error:
                    problems.append(f"{directory}: {error.strerror}")
                    continue
                events, torn = events + one.events, torn + one.torn
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

    def _add_run(self, directory: Path, host_prefix: str) -> Indexed:
        journal = directory / "journal"
        names = sorted(n for n in os.listdir(journal) if n.endswith(".jsonl") and n.startswith(host_prefix))
        heads = {name: head for name in names if _is_text(name) and (head := _head(journal / name)) is not None}
        run, taken = self._run_of(str(directory), heads, host_prefix)
        # What nobody has written to since costs no transaction.
        todo = [one for one in heads.items() if taken.get(one[0]) != (one[1], (journal / one[0]).stat().st_size)]
        events = torn = 0
        while todo:
            step = self._step(run, journal, todo)
            events, torn, todo = events + step.events, torn + step.torn, step.rest
        if not host_prefix:
            self._note_taken(run)
        return Indexed(1, events, torn)

    def _note_taken(self, run: int) -> None:
        from sqlalchemy import select, update

        runs = self.tables.runs
        with self.engine.begin() as connection:
            if connection.execute(select(runs.c.is_untaken).where(runs.c.id == run)).scalar():
                connection.execute(update(runs).where(runs.c.id == run).values(is_untaken=False))

    def _run_of(self, path: str, heads: dict[str, str], host_prefix: str) -> tuple[int, dict[str, tuple[str, int]]]:
        """Return the run's row, and of each file its head and how far it was taken.

        A new row where the name is used again, so that no file of then is there any more.
        """
        from sqlalchemy import select

        runs, files = self.tables.runs, self.tables.files
        newest = select(runs.c.id, runs.c.generation).where(runs.c.path == path).order_by(runs.c.generation.desc())
        with self.engine.begin() as connection:
            row = connection.execute(newest.limit(1)).first()
            generation = 0
            if row is not None:
                columns = select(files.c.name, files.c.head, files.c.read_to).where(files.c.run == row.id)
                known = connection.execute(columns).all()
                ours = {name: (head, int(read_to)) for name, head, read_to in known if name.startswith(host_prefix)}
                if not heads or not ours or any(heads.get(name) == head for name, (head, _) in ours.items()):
                    return int(row.id), ours
                generation = row.generation + 1
            self._upsert(connection, runs, [first_of(path, generation)], ("path", "generation"), {})
            return int(connection.execute(newest.limit(1)).one().id), {}

    def _step(self, run: int, journal: Path, todo: Sequence[tuple[str, str]]) -> _Step:
        """Take in the next lines of these files, by name and head, some megabytes of them; return what is left."""
        from sqlalchemy import case, delete, select, update

        tables, runs, files = self.tables, self.tables.runs, self.tables.files
        rows, places, left, torn = Rows(), [], _CHUNK_BYTES, 0
        rest: list[tuple[str, str]] = []
        with self.engine.begin() as connection:
            connection.execute(update(runs).where(runs.c.id == run).values(turn=1 - runs.c.turn))  # others wait here
            known = {row.name: row for row in connection.execute(select(files).where(files.c.run == run))}
            for name, head in todo:
                if left <= 0:
                    rest.append((name, head))
                    continue
                row, size = known.get(name), (journal / name).stat().st_size
                read_to, torn_before = (0, 0) if row is None else (int(row.read_to), int(row.torn))
                if row is not None and (row.head != head or size < read_to):
                    # Another file has the name, or it was cut: what it has told is told again.
                    for table in (tables.starts, tables.attempts, tables.findings):
                        connection.execute(delete(table).where((table.c.run == run) & (table.c.file == name)))
                    read_to = torn_before = 0
                data = _whole_lines(journal / name, read_to) if size > read_to else b""
                if not data:
                    continue
                rows.file, bad = name, 0
                for event, offset in _events(data, read_to):
                    if event is None:
                        bad += 1
                    else:
                        rows.add(event, offset)
                place = {"name": name, "head": head, "read_to": read_to + len(data), "torn": torn_before + bad}
                places.append({"run": run, **place})
                torn, left = torn + bad, left - len(data)
                if read_to + len(data) < size:
                    rest.append((name, head))
            if not places:
                return _Step(0, 0, rest)
            self._write(connection, run, rows)
            self._upsert(connection, files, places, ("run", "name"), {"head": None, "read_to": None, "torn": None})
            if rows.first_at is not None:
                earliest = case((runs.c.first_at < rows.first_at, runs.c.first_at), else_=rows.first_at)
                latest = case((runs.c.last_at > rows.last_at, runs.c.last_at), else_=rows.last_at)
                values = {"first_at": earliest, "last_at": latest, "events": runs.c.events + rows.events}
                told = {"launched": True} if rows.launched else {}
                connection.execute(update(runs).where(runs.c.id == run).values(**values, **told))
        return _Step(rows.events, torn, rest)

    def _write(self, connection: Connection, run: int, rows: Rows) -> None:
        from sqlalchemy import case, func

        tables = self.tables
        self._upsert(connection, tables.starts, _of(run, rows.starts), ("run", "file", "at"), {"facts": None})
        attempts = tables.attempts

        def merged(new: Any) -> dict[str, Any]:
            began = case((attempts.c.began_at < new.began_at, attempts.c.began_at), else_=new.began_at)
            ended = case((attempts.c.ended_at > new.ended_at, attempts.c.ended_at), else_=new.ended_at)
            values = {name: new[name] for name in ("world_size", "nodes", "node", "alias")}
            values |= {"began_at": began, "ended_at": ended}
            return {name: func.coalesce(value, attempts.c[name]) for name, value in values.items()}

        self._upsert(connection, attempts, _of(run, rows.attempts), ("run", "file", "job", "attempt"), merged)
        last = {
            name: None for name in ("at", "kind", "category", "cause", "action", "confidence", "signature", "nodes")
        }
        self._upsert(connection, tables.failures, _of(run, rows.failures), ("run", "incident", "host"), last)
        told = {"recovery_s": None, "lost_steps": None}
        self._upsert(connection, tables.recoveries, _of(run, rows.recoveries), ("run", "incident"), told)
        self._upsert(connection, tables.findings, _of(run, rows.findings), ("run", "file", "offset"), {})

    def _upsert(
        self, connection: Connection, table: Table, rows: Sequence[dict[str, Any]], keys: Sequence[str], changes: Any
    ) -> None:
        """Insert rows; of those that are there, `changes` are made: None for a column takes the new value."""
        if connection.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert
        else:
            from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            statement = insert(table).values(rows[at : at + _ROWS_AT_ONCE])
            made = changes(statement.excluded) if callable(changes) else changes
            values = {name: statement.excluded[name] if value is None else value for name, value in made.items()}
            if values:
                statement = statement.on_conflict_do_update(index_elements=list(keys), set_=values)
            else:
                statement = statement.on_conflict_do_nothing(index_elements=list(keys))
            connection.execute(statement)


def _of(run: int, rows: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"run": run, **row} for row in rows.values()]


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


def _head(path: Path) -> str | None:
    """Return a sum over a file's first line; None before there is one, or where the file is gone."""
    try:
        with open(path, "rb") as file:
            first = file.readline(_HEAD_BYTES)
    except OSError:
        return None
    return hashlib.sha256(first).hexdigest()[:32] if first.endswith(b"\n") or len(first) == _HEAD_BYTES else None


def _whole_lines(path: Path, offset: int) -> bytes:
    """Return the next whole lines of a file, some megabytes of them; what stands behind the last is being written."""
    length = _CHUNK_BYTES
    with open(path, "rb") as file:
        while True:
            file.seek(offset)
            data = file.read(length)
            if end := data.rfind(b"\n") + 1:
                return data[:end]
            if len(data) < length or length >= _LONGEST_LINE_BYTES:
                return data if length >= _LONGEST_LINE_BYTES else b""
            length *= 4
