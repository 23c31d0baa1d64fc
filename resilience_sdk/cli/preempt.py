"""`resilience preempt`: asks the job that runs in a directory to save and stop.

The request is a file, so it reaches jobs on other hosts and under any launcher. Their monitors look for it.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.cli.common import open_run_dir, print_json, print_lines, reading_parser
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.journal import CURVES, Event, read_journal
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import one_line
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError, RunDirectoryError
from resilience_sdk.system.hostinfo import host_name

VERSION = 1
KEYS = ("run_dir", "job", "host", "pid", "file", "t", "reason", "by", "exit_code", "launcher")
_REASON = "resilience preempt"
OURS, TORCHRUN = "resilience run", "torchrun"
"""What `launcher` may be."""


def main(argv: Sequence[str]) -> int:
    """Write the request and return 0.

    Raises:
        RunDirectoryError: It is no run directory, or no job runs in it.
        ConfigError: The request cannot be written there.
    """
    parser = reading_parser(
        "preempt",
        "Ask the job that runs in a directory to save and stop: all ranks stop at the same step, and leave with "
        f"exit code {EXIT_PREEMPTED}, as resilience run then does. Other launchers have exit codes of their own.",
    )
    parser.add_argument("--reason", default=_REASON, metavar="TEXT", help="what the journal and the incident say")
    options = parser.parse_args(argv)
    asked = ask(open_run_dir(options.run_dir), redact_text(one_line(options.reason)))
    if options.json:
        print_json(asked)
    else:
        print_lines(render(asked))
    return 0


def ask(run_dir: RunDirectory, reason: str) -> dict[str, Any]:
    """Write `RUN_DIR/preempt` for the job that runs there, and return what was asked of whom (`KEYS`)."""
    holder = current_holder(run_dir)
    if holder is None:
        state = "its training is complete" if run_dir.is_finished() else "no job runs in it"
        raise RunDirectoryError(f"nothing was asked: {state}; resilience status {run_dir.path} tells what is known")
    request = {"v": VERSION, "t": time.time(), "reason": reason, "by": _who()}
    try:
        write_whole(run_dir.preempt, json.dumps(request) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {run_dir.preempt}: {error.strerror}; ask its owner to run this, or send the launcher "
            f"(pid {holder.pid} on {holder.host}) a SIGTERM"
        ) from None
    return {
        "run_dir": str(run_dir.path),
        "job": holder.job,
        "host": holder.host,
        "pid": holder.pid,
        "file": str(run_dir.preempt),
        "t": request["t"],
        "reason": reason,
        "by": request["by"],
        "exit_code": EXIT_PREEMPTED,
        "launcher": _launcher(run_dir, holder.job),
    }


def render(asked: dict[str, Any]) -> list[str]:
    """Return for a person what was asked, and what will happen."""
    return [
        f"asked job {asked['job']} on {asked['host']} to save and stop ({asked['reason']})",
        f"all its ranks stop at one step that they agree on; {_told_end(asked)}",
        "under resilience supervise it is then run again; what it saved and how to resume: "
        f"resilience outcome {asked['run_dir']}",
    ]


def _told_end(asked: Mapping[str, Any]) -> str:
    """Say with which code the job ends: only a launcher of ours leaves with the ranks' own."""
    code, launcher = asked["exit_code"], asked["launcher"]
    if launcher == OURS:
        return f"{OURS} ends with exit code {code}"
    told = f"resilience outcome --exit-code {asked['run_dir']} leaves with {code}"
    if launcher == TORCHRUN:
        return f"the ranks leave with {code}, upon which torchrun ends with its own exit code 1: {told}"
    return f"the ranks leave with {code}; where a launcher hides that, {told}"


def _launcher(run_dir: RunDirectory, job: str) -> str | None:
    """Return what started the ranks of a job, as far as its journal and its key tell."""
    events = read_journal(run_dir.journal, without=CURVES).events
    if any(event["event"] == Event.RUN_START.value and event.get("job") == job for event in events):
        return OURS
    return TORCHRUN if job.startswith("elastic-") else None


def _who() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        name = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{name}@{host_name()}"
