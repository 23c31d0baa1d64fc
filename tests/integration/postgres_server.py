"""A real PostgreSQL of the test's own: Debian's server, in a folder, behind a socket, and gone afterwards."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import needed

from resilience_sdk.history.schema import open_engine


def server_folder() -> Path:
    """Return where the programs of the newest PostgreSQL server are; a test without one is skipped."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda path: int(path.split("/")[4]))
    return Path(found[-1]).parent if found else needed.missing("no PostgreSQL server: apt-get install postgresql")


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Run a server and yield the URL of its first database."""
    programs = server_folder()
    folder = Path(tempfile.mkdtemp(prefix="resilience-pg-", dir="/tmp"))
    os.chmod(folder, 0o755)
    data = folder / "data"
    prefix: list[str] = []
    if os.geteuid() == 0:  # the server refuses to be root's
        shutil.chown(folder, "postgres")
        prefix = ["runuser", "-u", "postgres", "--"]
    options = f"-k {folder} -c listen_addresses= -c fsync=off -c full_page_writes=off"

    def run(program: str, *words: str) -> None:
        subprocess.run([*prefix, str(programs / program), *words], check=True, capture_output=True, cwd=folder)

    try:
        run("initdb", "-D", str(data), "-A", "trust", "-U", "tester", "--no-sync")
        run("pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_database(url: str, name: str) -> str:
    """Make a database in the server of a URL that `postgres` has yielded; return its URL."""
    engine = open_engine(url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return url.replace("/postgres?", f"/{name}?")
