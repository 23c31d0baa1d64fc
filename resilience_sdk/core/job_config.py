"""The configuration of a job on one node, as its processes agree on it: its place, its settings, its owner.

The first of them writes it into the job's page directory; the others, and the monitor, read it there.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import json_records
from resilience_sdk.core.atomic_write import Version, version_of, write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.system import hostinfo
from resilience_sdk.system.file_lock import file_lock

FILE = "config.json"
_LOCK = "config.lock"
# What the stop of an attempt leaves; each is the beginning of file names, with the number of the attempt behind it.
WORD, WISH, COORDINATOR = "word-a", "wish-a", "coordinator-a"
# What monitor and launcher say of an attempt, by its number too.
_SAID = ("verdict-", "ending-", "attempt-")
_PATIENCE_S = 2.0


@attrs.frozen
class JobConfig:
    """One job on one node."""

    job: str
    """The job key."""
    run_dir: str
    run_named: bool
    """Whether the user named the run directory, so that resuming into it is meant."""
    settings: Mapping[str, Any]
    """Effective settings as JSON."""
    on_hang: str
    """`restart`, `report` or `kill`, decided."""
    script: str
    launcher_pid: int | None
    """Our launcher, or None under a foreign one."""
    launcher_ticks: int | None
    creator_pid: int
    creator_ticks: int
    parent_pid: int
    """Who started the ranks: tells a restart by the same foreign launcher from a later job with the same key."""
    parent_ticks: int
    instead_of: str | None = None
    """The run directory that the user named, where another job used it, so that this one has a sibling of it."""
    pid_namespace: str = attrs.field(factory=hostinfo.pid_namespace)
    """Where the process ids above mean something: containers may share the page directories' place."""
    run_device: int | None = None
    """The device that the run directory is on: where another one is in its place, nothing is written."""
    began_ns: int = attrs.field(factory=time.monotonic_ns)
    """When its ranks began to come, on this host's monotonic clock: older pages are of a start before."""

    @property
    def foreign(self) -> bool:
        """Whether somebody else's launcher (torchrun, srun, python) started the ranks."""
        return self.launcher_pid is None


def agree(pages: Path, proposal: JobConfig, is_over: Callable[[int], bool] = lambda _: False) -> JobConfig:
    """Return what the job agreed on: what stands in `pages` if it is this job's, else `proposal`, written there.

    A foreign launcher may start its ranks again without a number that tells: `is_over(began_ns)` is asked then
    whether the start that began at that time has ended. If so, what stands is written anew in the name of
    `proposal`, with the same settings. With a new agreement goes what was said of the attempts before: the next ones
    have the same numbers, and would find a stop that is decided already.

    Raises OSError when the page directory cannot be used.
    """
    with locked(pages):
        standing = read(pages)
        if standing is not None and _belongs_together(standing, proposal):
            if not standing.foreign or not is_over(standing.began_ns):
                return standing
            proposal = attrs.evolve(
                standing,
                creator_pid=proposal.creator_pid,
                creator_ticks=proposal.creator_ticks,
                began_ns=proposal.began_ns,
            )
        for path in pages.iterdir():
            if path.name.startswith((WORD, WISH, COORDINATOR, *_SAID)):
                path.unlink(missing_ok=True)
        write(pages, proposal)
        return proposal


@contextlib.contextmanager
def locked(pages: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[bool]:
    """Hold the lock on the configuration in `pages`; yields whether it was to be had (see `file_lock`)."""
    with file_lock(pages / _LOCK, patience_s=patience_s) as mine:
        yield mine


def write(pages: Path, config: JobConfig) -> None:
    """Write the configuration into `pages`, whatever stands there; hold the lock. Raises OSError."""
    write_whole(pages / FILE, json_records.to_text(config))


def written_at(pages: Path) -> float | None:
    """Return when the job agreed (Unix seconds), which is when it began on this node; None where nothing stands."""
    try:
        return (pages / FILE).stat().st_mtime
    except OSError:
        return None


def version(pages: Path) -> Version | None:
    """Return what changes whenever the configuration is written anew; None where nothing stands. One system call."""
    return version_of(f"{pages}/{FILE}")


def read(pages: Path) -> JobConfig | None:
    """Return the job's configuration, or None when there is none that can be read; one that is damaged is said."""
    try:
        return json_records.from_values(JobConfig, json.loads(read_text(pages / FILE)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say_once(
            "job config", f"what the job agreed on cannot be read in {pages / FILE}, it counts as missing: {error}"
        )
        return None


def _belongs_together(standing: JobConfig, proposal: JobConfig) -> bool:
    if standing.job != proposal.job:
        return False
    if standing.launcher_pid is not None:
        return _alive(standing.launcher_pid, standing.launcher_ticks)
    if _alive(standing.creator_pid, standing.creator_ticks):
        return True
    if not standing.parent_pid:
        return False  # a process of its own, which is gone: nobody restarts it
    # The same launcher may restart its ranks, or start another job after the first: a directory named anew tells.
    same_parent = (standing.parent_pid, standing.parent_ticks) == (proposal.parent_pid, proposal.parent_ticks)
    return same_parent and (standing.run_dir == proposal.run_dir or not proposal.run_named)


def _alive(pid: int, ticks: int | None) -> bool:
    if not ticks:  # no start times on this platform: the pid has to do, and a gone one is proof
        return pid > 0 and not hostinfo.process_is_gone(pid, None)
    return hostinfo.process_start_ticks(pid) == ticks
