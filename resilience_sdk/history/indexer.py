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

from resilience_sdk.core.journal import parse_lines
from resilience_sdk.errors import ConfigError
from resilience_sdk.history.facts import Rows
from resilience_sdk.history.schema import Tables, open_engine, prepare

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


def run_directories(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """Return the run directories among `folders` and right below them, and what is none of either."""
    found: dict[str, None] = {}
    problems = []
    for folder in map(Path, folders):
        # Not `Path.is_dir`, which raises for what belongs to somebody else.
        below = [folder] if os.path.isdir(folder / "journal") else []
        if not below and os.path.isdir(folder):
            below = sorted(one for one in folder.iterdir() if os.path.isdir(one / "journal"))
        if not below:
            problems.append(f"{folder} is no run directory and has none in it")
        found.update(dict.fromkeys(os.path.realpath(one) for one in below))
    return [Path(path) for path in found], problems


class Index:
    """The index in one database. One thread at a time."""

    def __init__(self, named: str) -> None:
        """Open the database and make what it lacks; raises ConfigError and MissingExtraError."""
        from sqlalchemy.exc import DBAPIError

        self.engine = open_engine(named)
        self.tables = Tables()
        try:
            self._again = prepare(self.engine, self.tables)
        except DBAPIError as error:
            self.close()
            raise ConfigError(f"the history cannot be opened: {str(error.orig).strip()}") from None
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the database."""
        self.engine.dispose()

    def add(self, folders: Sequence[str | os.PathLike[str]], *, host_prefix: str = "") -> Indexed:
        """Take in what is new in these run directories; `host_prefix` of the names of files leaves out the others.

        Raises ConfigError where the database does not answer; a directory that cannot be read is told as a problem.
        """
        from sqlalchemy.exc import DBAPIError

        directories, problems = run_directories([*folders, *(path for path in self._again if os.path.isdir(path))])
        self._again = []
        events = torn = 0
        try:
            for directory in directories:
                try:
                    one = self._add_run(directory, host_prefix)
                except OSError as error:
                    problems.append(f"{directory}: {error.strerror}")
                    continue
                events, torn = events + one.events, torn + one.torn
        except DBAPIError as error:
            raise ConfigError(f"the history does not answer: {str(error.orig).strip()}") from None
        return Indexed(len(directories), events, torn, tuple(problems))

    def _add_run(self, directory: Path, host_prefix: str) -> Indexed:
        journal = directory / "journal"
        names = sorted(n for n in os.listdir(journal) if n.endswith(".jsonl") and n.startswith(host_prefix))
        heads = {name: head for name in names if (head := _head(journal / name)) is not None}
        events = torn = 0
        run = self._run_of(str(directory), heads, host_prefix)
        for name, head in heads.items():
            while (one := self._add_chunk(run, journal / name, head)) is not None:
                events, torn = events + one.events, torn + one.torn
        return Indexed(1, events, torn)

    def _run_of(self, path: str, heads: dict[str, str], host_prefix: str) -> int:
        """Return the run's row: a new one where the name is used again, so that no file of then is there any more."""
        from sqlalchemy import select

        runs, files = self.tables.runs, self.tables.files
        newest = select(runs.c.id, runs.c.generation).where(runs.c.path == path).order_by(runs.c.generation.desc())
        with self.engine.begin() as connection:
            row = connection.execute(newest.limit(1)).first()
            generation = 0
            if row is not None:
                known = connection.execute(select(files.c.name, files.c.head).where(files.c.run == row.id)).all()
                ours = [(name, head) for name, head in known if name.startswith(host_prefix)]
                if not heads or not ours or any(heads.get(name) == head for name, head in ours):
                    return int(row.id)
                generation = row.generation + 1
            first = {"path": path, "generation": generation, "launched": False, "events": 0, "turn": 0}
            self._upsert(connection, runs, [first], ("path", "generation"), {})
            return int(connection.execute(newest.limit(1)).one().id)

    def _add_chunk(self, run: int, path: Path, head: str) -> Indexed | None:
        """Take in the next lines of a file; None where there are none."""
        from sqlalchemy import case, delete, select, update

        tables, runs, files = self.tables, self.tables.runs, self.tables.files
        with self.engine.begin() as connection:
            connection.execute(update(runs).where(runs.c.id == run).values(turn=1 - runs.c.turn))  # others wait here
            this = (files.c.run == run) & (files.c.name == path.name)
            known = connection.execute(select(files.c.head, files.c.read_to, files.c.torn).where(this)).first()
            read_to, torn = (0, 0) if known is None else (int(known.read_to), int(known.torn))
            size = path.stat().st_size
            if known is not None and (known.head != head or size < read_to):
                # Another file has the name, or it was cut: what it has told is told again.
                for table in (tables.starts, tables.attempts, tables.findings):
                    connection.execute(delete(table).where((table.c.run == run) & (table.c.file == path.name)))
                read_to = torn = 0
            if size <= read_to:
                return None
            data = _whole_lines(path, read_to)
            if not data:
                return None
            rows, bad = Rows(path.name), 0
            for event, offset in _events(data, read_to):
                if event is None:
                    bad += 1
                else:
                    rows.add(event, offset)
            self._write(connection, run, rows)
            place = {"run": run, "name": path.name, "head": head, "read_to": read_to + len(data), "torn": torn + bad}
            self._upsert(connection, files, [place], ("run", "name"), {"head": None, "read_to": None, "torn": None})
            if rows.first_at is not None:
                earliest = case((runs.c.first_at < rows.first_at, runs.c.first_at), else_=rows.first_at)
                latest = case((runs.c.last_at > rows.last_at, runs.c.last_at), else_=rows.last_at)
                values = {"first_at": earliest, "last_at": latest, "events": runs.c.events + rows.events}
                told = {"launched": True} if rows.launched else {}
                connection.execute(update(runs).where(runs.c.id == run).values(**values, **told))
            return Indexed(1, rows.events, bad)

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
