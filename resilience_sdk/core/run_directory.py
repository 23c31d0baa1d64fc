"""The run directory: where everything that lasts is written, shared between nodes and between jobs.

RUN_DIR/                     mode 0700 (0750 when the group may read)
  journal/*.jsonl            events, one writer per file
  incidents/0001-hang/       what went wrong
  checkpoints/step-00000120/
  timeouts.json              learned deadlines
  outcome.json               how the last job ended
  lease.json                 which job uses it now (see `lease`)
  writer.json                which process writes its checkpoints now
  finished                   the flag: training is complete
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.linked_directories import refuse_bad_links
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.system import same_device

DEFAULT_ROOT = "resilience-runs"
_SUBDIRECTORIES = ("journal", "incidents", "checkpoints")
_OTHER_DIRECTORY = "name another directory with --run-dir or RESILIENCE_RUN_DIR"


def _inside(name: str) -> Any:
    return attrs.Factory(lambda run: run.path / name, takes_self=True)


@attrs.frozen
class RunDirectory:
    """The paths of one run directory. Made by `create` (to write) or `open` (to read)."""

    path: Path

    journal: Path = attrs.field(default=_inside("journal"), init=False, eq=False, repr=False)
    """Directory of the event files."""
    incidents: Path = attrs.field(default=_inside("incidents"), init=False, eq=False, repr=False)
    """Directory of the incidents."""
    checkpoints: Path = attrs.field(default=_inside("checkpoints"), init=False, eq=False, repr=False)
    """Directory of the checkpoints."""
    timeouts: Path = attrs.field(default=_inside("timeouts.json"), init=False, eq=False, repr=False)
    """File with the learned deadlines."""
    finished: Path = attrs.field(default=_inside("finished"), init=False, eq=False, repr=False)
    """The flag file that says: training is complete."""
    outcome: Path = attrs.field(default=_inside("outcome.json"), init=False, eq=False, repr=False)
    """File with the verdict and exit code of the last job."""
    report: Path = attrs.field(default=_inside("report.html"), init=False, eq=False, repr=False)
    """The page that `resilience report` makes of it all."""
    lease: Path = attrs.field(default=_inside("lease.json"), init=False, eq=False, repr=False)
    """File that says which job uses the directory."""
    writer: Path = attrs.field(default=_inside("writer.json"), init=False, eq=False, repr=False)
    """File that says which process writes the checkpoints."""
    logs: Path = attrs.field(default=_inside("logs"), init=False, eq=False, repr=False)
    """Directory of what ranks print, where it does not go to where the launcher's output goes."""
    preempt: Path = attrs.field(default=_inside("preempt"), init=False, eq=False, repr=False)
    """File whose appearance asks the job to save and leave."""

    def unwritten_output(self, writer: str) -> Path:
        """Return the file for what `writer` (`rank-3`, or a host's launcher and monitor) prints and nobody takes."""
        return self.logs / f"output-{writer}.txt"

    def __fspath__(self) -> str:
        """Return the path as text, so that the value itself can be used as a path."""
        return str(self.path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, group_readable: bool = False) -> RunDirectory:
        """Make the directory and its parts where they are missing; safe when several ranks do it at once.

        Raises:
            RunDirectoryError: It cannot be made or written, is another user's, or others may write to it.
        """
        run = cls(Path(os.path.abspath(path)))
        mode = 0o750 if group_readable else 0o700
        try:
            refuse_bad_links(run.path)
            same_device.check(run.path)
            fresh = _make_root(run.path, mode)
            for name in _SUBDIRECTORIES:
                _make_directory(run.path / name, mode)
            # A user's own directory (`--run-dir .`) is not ours to hide from git as a whole.
            for place in [run.path] if fresh else [run.path / name for name in _SUBDIRECTORIES]:
                _write_new(place / ".gitignore", "*\n")
        except OSError as error:
            reason = error.strerror or error
            if isinstance(error, FileExistsError) and error.filename:
                reason = f"{error.filename} is not a directory"
            raise RunDirectoryError(f"cannot use {run.path} as run directory: {reason}; {_OTHER_DIRECTORY}") from None
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Return an existing run directory for reading.

        Raises:
            RunDirectoryError: There is none, or it cannot be read.
        """
        run = cls(Path(os.path.abspath(path)))
        try:
            names = set(os.listdir(run.path))
        except FileNotFoundError:
            raise RunDirectoryError(f"there is no run directory {run.path}; check the path") from None
        except NotADirectoryError:
            raise RunDirectoryError(f"{run.path} is a file; name the run directory that it lies in") from None
        except OSError as error:
            raise RunDirectoryError(
                f"cannot read {run.path}: {error.strerror}; ask {_owner(run.path)} to run this, or for a "
                "run with group_readable"
            ) from None
        if not names & {*_SUBDIRECTORIES, "outcome.json", "finished"}:
            raise RunDirectoryError(
                f"{run.path} is no run directory (it has no journal); name the directory given to --run-dir"
            )
        return run

    def is_finished(self) -> bool:
        """Tell whether training in this directory is complete."""
        return self.finished.exists()

    def is_unused(self) -> bool:
        """Tell whether no job has written into the directory, so that there is nothing to set aside."""
        with contextlib.suppress(OSError):
            names = set(os.listdir(self.path)) - {".gitignore", *_SUBDIRECTORIES}
            return not names and not any(set(os.listdir(self.path / n)) - {".gitignore"} for n in _SUBDIRECTORIES)
        return False

    def mark_finished(self, env: Mapping[str, str] | None = None) -> None:
        """Set the flag, and the file that `FAULT_TOL_FINISHED_FLAG_FILE` names in `env` (default: ours).

        Raises:
            RunDirectoryError: The flag cannot be written; then the job would be started again.
        """
        try:
            same_device.check(self.finished)
            self.finished.touch(mode=0o600)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write {self.finished}: {error.strerror}; create it by hand to say that training is complete"
            ) from None
        tell_finished(env)

    def set_aside(self) -> Path | None:
        """Rename the directory, so that a fresh start finds nothing; return its new path, or None if missing.

        Nothing is deleted: what a `--fresh` run replaces may be weeks of work.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        target = self.path.with_name(f"{self.path.name}.before-{stamp}-{os.urandom(2).hex()}")
        try:
            self.path.rename(target)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunDirectoryError(f"cannot set {self.path} aside: {error.strerror}; {_OTHER_DIRECTORY}") from None
        return target


def tell_finished(env: Mapping[str, str] | None = None) -> None:
    """Create the file that `FAULT_TOL_FINISHED_FLAG_FILE` names in `env` (default: ours), if it names one."""
    env = environ.environment() if env is None else env
    if flag := env.get(environ.FINISHED_FLAG_FILE):
        try:
            Path(flag).touch()
        except OSError as error:
            say_once(f"flag:{flag}", f"cannot write {flag} ({environ.FINISHED_FLAG_FILE}): {error.strerror}")


def choose_run_dir(script: str, env: Mapping[str, str], explicit: str | None) -> tuple[Path, bool]:
    """Return the run directory of a job, and whether its runs may be resumed from.

    In order: `explicit` (argument or setting), `RESILIENCE_RUN_DIR`, one per scheduler job, else a new one
    per start, which nobody named and nothing is resumed from. Only names are chosen here, nothing is made.
    """
    if named := explicit or env.get(environ.RUN_DIR):
        return Path(os.path.abspath(os.path.expanduser(named))), True
    root = Path(os.path.abspath(DEFAULT_ROOT))
    if job := environ.scheduler_job(env):
        return root / re.sub(r"[^A-Za-z0-9._-]", "_", job), True
    name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(script).name.removesuffix(".py")).strip(".") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return root / f"{name}-{stamp}-{os.urandom(2).hex()}", False


def newest_run_dir(env: Mapping[str, str] | None = None, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the run directory that commands use when none is named: `RESILIENCE_RUN_DIR`, else the newest.

    Newest is the one under `root` (default `./resilience-runs`) in which something was started last.

    Raises:
        RunDirectoryError: There is none.
    """
    env = environ.environment() if env is None else env
    if named := env.get(environ.RUN_DIR):
        return Path(os.path.abspath(os.path.expanduser(named)))
    place = Path(os.path.abspath(DEFAULT_ROOT if root is None else root))
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            started = max((_mtime(Path(entry.path, name)) for name in _SUBDIRECTORIES), default=0.0)
            if started > 0:
                found.append((started, entry.path))
    if not found:
        raise RunDirectoryError(f"there is no run directory under {place}; name one, or set {environ.RUN_DIR}")
    return Path(max(found)[1])


def _make_root(path: Path, mode: int) -> bool:
    """Make or check the directory itself; tell whether it is wholly ours (new, empty or made by us)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        os.chmod(path, mode)  # the umask must not widen or narrow it
        return True
    facts = path.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise RunDirectoryError(f"{path} is not a directory; {_OTHER_DIRECTORY}")
    if hasattr(os, "geteuid") and facts.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"{path} belongs to {_owner(path)}: what another user can change is never trusted; {_OTHER_DIRECTORY}"
        )
    names = set(os.listdir(path))
    ours = not names or {".gitignore", "journal"} <= names
    if not names:
        os.chmod(path, mode)
    elif facts.st_mode & 0o022 and os.name == "posix":
        raise RunDirectoryError(
            f"{path} can be written by other users, so what it holds cannot be trusted: "
            f"chmod go-w {path}, or {_OTHER_DIRECTORY}"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise RunDirectoryError(f"{path} cannot be written: chmod u+rwx {path}, or {_OTHER_DIRECTORY}")
    return ours


def _make_directory(path: Path, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        os.chmod(path, mode)
    if not path.is_dir():
        raise NotADirectoryError(0, f"{path.name} in it is not a directory")


def _write_new(path: Path, text: str) -> None:
    """Write a small file unless it is there: a user's own is never touched."""
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(text)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError, NotImplementedError):
        return "its owner"
