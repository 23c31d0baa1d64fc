"""The tables of the index, and the engine that they are in: SQLite by its path, PostgreSQL by its URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience_sdk.core.plain_file import open_plain, refuse_other_kinds
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from sqlalchemy import Engine, MetaData, Table

VERSION = 5
FILE_NAME = "history.db"
_WAIT_S = 60.0  # for another indexer
_NO_FILES = ("", ":memory:")
_CONNECT_S = 10  # for each address of a server
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


class Tables:
    """The tables, made when SQLAlchemy is there. Times are Unix seconds; clocks of a boot are nanoseconds."""

    def __init__(self) -> None:
        """Describe them."""
        from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

        def key(name: str, kind: Any = String) -> Column[Any]:
            return Column(name, kind, primary_key=True)

        self.all: MetaData = MetaData()
        self.index_version = Table("index_version", self.all, Column("version", Integer, primary_key=True))
        self.runs = Table(
            "runs", self.all,
            Column("id", Integer, primary_key=True),
            Column("path", Text, nullable=False),
            Column("generation", Integer, nullable=False),  # the same name, used again
            Column("launched", Boolean, nullable=False, default=False),  # by our launcher
            Column("first_at", Float), Column("last_at", Float),
            Column("events", BigInteger, nullable=False, default=0),
            Column("turn", Integer, nullable=False, default=0),
            Column("is_untaken", Boolean, nullable=False, default=False),  # known from an index of another version
            Index("one_generation", "path", "generation", unique=True),
        )  # fmt: skip
        self.files = Table(
            "files", self.all, key("run", Integer), key("name"),
            Column("head", String, nullable=False),  # of its first line: tells a file from another of its name
            Column("read_to", BigInteger, nullable=False),
            Column("torn", Integer, nullable=False, default=0),
        )  # fmt: skip
        self.starts = Table(
            "starts", self.all, key("run", Integer), key("file"), key("at", Float),
            Column("job", String), Column("host", String), Column("script", Text), Column("facts", Text),
            Column("alive_at", Float),  # the last sign of life of a job before it that did not tell its end
            Index("starts_of_script", "script", "at"), Index("starts_of_run", "run", "at"),
        )  # fmt: skip
        self.attempts = Table(
            "attempts", self.all, key("run", Integer), key("file"), key("job"), key("attempt", Integer),
            Column("host", String), Column("launched", Boolean), Column("world_size", Integer),
            Column("nodes", Integer), Column("node", String), Column("alias", String),
            Column("began_at", Float), Column("ended_at", Float),
            Index("attempts_ended", "ended_at"), Index("attempts_on_host", "run", "host", "began_at"),
            Index("attempts_of_job", "run", "job", "attempt", "node"),
        )  # fmt: skip
        self.failures = Table(
            "failures", self.all, key("run", Integer), key("incident"), key("host"),
            Column("at", Float, nullable=False), Column("job", String), Column("attempt", Integer),
            Column("kind", String), Column("category", String), Column("cause", String), Column("action", String),
            Column("confidence", Float), Column("signature", Text), Column("world_size", Integer),
            Column("nodes", Text), Column("summary", Text),
            Column("injected", Boolean),  # null: the incident did not tell, and no fault is known to have struck
            Index("failures_at", "at"), Index("failures_signature", "signature"),
        )  # fmt: skip
        self.culprits = Table(  # the nodes of failures, for what stands by them: `failures.nodes` says who they are
            "culprits", self.all, key("run", Integer), key("incident"), key("host"), key("node"),
        )  # fmt: skip
        self.strikes = Table(  # of injected faults: incidents of older versions do not tell of them
            "strikes", self.all, key("run", Integer), key("file"), key("offset", BigInteger),
            Column("job", String), Column("attempt", Integer), Index("strikes_in_attempt", "run", "job", "attempt"),
        )  # fmt: skip
        self.recoveries = Table(
            "recoveries", self.all, key("run", Integer), key("incident"),
            Column("recovery_s", Float), Column("lost_steps", BigInteger),
        )  # fmt: skip
        self.findings = Table(
            "findings", self.all, key("run", Integer), key("file"), key("offset", BigInteger),
            Column("at", Float, nullable=False), Column("host", String), Column("check", String),
            Column("status", String), Column("what", Text), Column("evidence", Text), Index("findings_at", "at"),
        )  # fmt: skip

    def derived(self) -> list[Table]:
        """Return what belongs to one run."""
        return [
            self.files, self.starts, self.attempts, self.failures, self.culprits, self.strikes, self.recoveries,
            self.findings,
        ]  # fmt: skip


def url_of(named: str) -> str:
    """Return the URL of a database that was named by it, or of an SQLite file that was named by its path."""
    if "://" not in named:
        return "sqlite+pysqlite:///" + os.path.abspath(named)
    scheme, _, rest = named.partition("://")
    return f"{_DRIVERS.get(scheme, scheme)}://{rest}"


def default_path(folder: Path) -> Path:
    """Return where the index of the runs in `folder` is, unless somebody names another place."""
    return folder / FILE_NAME


def open_engine(named: str, *, must_exist: bool = False) -> Engine:
    """Return an engine for a database, which is not asked yet; raises ConfigError and MissingExtraError."""
    try:
        import sqlalchemy
    except ImportError:
        raise MissingExtraError(
            "the history needs SQLAlchemy: pip install 'resilience-sdk[history]' (with PostgreSQL: [postgres])"
        ) from None
    url = url_of(named)
    is_file = url.startswith("sqlite")
    path = url.partition(":///")[2].partition("?")[0]
    if (is_file and path in _NO_FILES) or url.partition("://")[0].partition("+")[0] not in _DRIVERS:
        raise ConfigError(
            f"--db {redact_text(named)}: the history is in a file or in PostgreSQL; name a path, or a URL such as "
            "postgresql://user@host/database"
        )
    if is_file and must_exist and not os.path.exists(path):
        raise ConfigError(
            f"there is no history in {path} yet; make one: resilience history index DIR..., or name another with --db"
        )
    if is_file:
        try:
            refuse_other_kinds(path)
        except OSError as error:
            raise ConfigError(
                f"the history {path} cannot be used: {error.strerror}; name another file with --db"
            ) from None
    try:
        if is_file:
            engine = sqlalchemy.create_engine(url, connect_args={"timeout": _WAIT_S, "isolation_level": None})
        else:
            engine = sqlalchemy.create_engine(url, pool_pre_ping=True)
            _have_patience(engine)
    except ImportError as error:
        raise MissingExtraError(
            f"the history in {redact_text(named)} needs a driver ({error}): pip install 'resilience-sdk[postgres]'"
        ) from None
    except Exception as error:  # noqa: BLE001 - of many kinds: a port that is no number, an unknown dialect
        raise ConfigError(
            f"--db {redact_text(named)}: {type(error).__name__}: {redact_text(str(error))}; name a file, or a URL such "
            "as postgresql://user@host/database"
        ) from None
    if is_file and not must_exist:
        _write_to_file(engine, Path(path))
    return engine


def _have_patience(engine: Engine) -> None:
    """Have a server that does not answer, or an indexer that was stopped, be waited for with an end; and answers soon.

    Commands ask in the seconds in which a job comes back, and before each run of a supervised one.
    """
    from sqlalchemy import event

    def connect(_: Any, __: Any, ___: Any, values: dict[str, Any]) -> None:
        values.setdefault("connect_timeout", _CONNECT_S)
        values.setdefault("client_encoding", "utf8")  # a database without an encoding (SQL_ASCII) answers with bytes

    def begin(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = '{_WAIT_S:.0f}s'")
            cursor.execute("SET jit = off")  # it compiles for seconds what takes milliseconds
        connection.commit()

    if engine.dialect.name == "postgresql":
        event.listen(engine, "do_connect", connect)
        event.listen(engine, "connect", begin)


def _write_to_file(engine: Engine, path: Path) -> None:
    """Have each transaction take SQLite's write lock at its beginning: two that read first could not both go on."""
    from sqlalchemy import event

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_plain(path, os.O_CREAT | os.O_RDWR))
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=NORMAL"))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def first_of(path: str, generation: int = 0) -> dict[str, Any]:
    """Return the row of a run of which nothing was taken yet."""
    return {"path": path, "generation": generation, "launched": False, "events": 0, "turn": 0, "is_untaken": False}


def prepare(engine: Engine, tables: Tables) -> None:
    """Make the tables; of an older version's index only the paths of its runs stay, to be taken in again."""
    from sqlalchemy import inspect, select, text

    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(7330481)"))
        found = set(inspect(connection).get_table_names())
        paths: list[str] = []
        if tables.index_version.name in found:
            version = connection.execute(select(tables.index_version.c.version)).scalar()
            if version == VERSION:
                return
            if version is not None and version > VERSION:
                raise ConfigError(newer(version))
            if tables.runs.name in found:
                paths = sorted(set(connection.execute(text("SELECT path FROM runs")).scalars()))
        elif foreign := found & set(tables.all.tables):
            raise ConfigError(f"the database has a table {min(foreign)} that is not ours; name another one with --db")
        tables.all.drop_all(connection)
        tables.all.create_all(connection)
        connection.execute(tables.index_version.insert().values(version=VERSION))
        if paths:
            connection.execute(tables.runs.insert(), [first_of(path) | {"is_untaken": True} for path in paths])


def newer(version: int) -> str:
    """Return what is said of an index that a newer version has made."""
    return (
        f"the history was made by a newer resilience_sdk (schema {version}, here {VERSION}): use that, or another --db"
    )
