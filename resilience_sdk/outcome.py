"""How a job ended: the verdict, its exit code, and `outcome.json` for programs.

Written by our launcher, and by the monitor where a foreign launcher's exit code hides the verdict.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.console import say_once
from resilience_sdk.whole_file import write_whole

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_HARDWARE = 76
EXIT_STOP = 77
EXIT_INTERRUPTED = 130


class Verdict(str, Enum):
    """How the job goes on. Values are what the journal and `outcome.json` show."""

    RESTART = "restart"
    FINISHED = "finished"
    PREEMPTED = "preempted"
    HARDWARE = "hardware"
    STOP = "stop"
    GIVE_UP = "give_up"
    INTERRUPTED = "interrupted"


@attrs.frozen
class Outcome:
    """The end of one job. Times are Unix seconds."""

    verdict: Verdict
    exit_code: int
    reason: str
    job: str
    run_dir: str
    node: str
    started_at: float
    ended_at: float
    attempts: int
    what: str | None = None
    """The last fault in one line: which rank, how, in which step."""
    incidents: tuple[str, ...] = ()
    checkpoint: int | None = None
    """Newest step that can be resumed from."""
    resume: str | None = None
    """Command line that goes on from there."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of `outcome.json`: every key always there, null for what is not known."""
        data = attrs.asdict(self)
        return {**data, "verdict": self.verdict.value, "incidents": list(self.incidents)}


_TO_RESUME = {
    Verdict.STOP: "to run it again, once it is repaired",
    Verdict.HARDWARE: "to resume on another node",
}
TO_RESUME = ("to resume", "to run it again")
"""How the lines begin that end with a command to copy."""


def to_resume(verdict: Verdict, command: str) -> str:
    """Return the line with the command that goes on, and when or where it makes sense."""
    return f"{_TO_RESUME.get(verdict, 'to resume')}: {command}"


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write `outcome.json`, whole or not at all; a full disk is said and not raised."""
    try:
        write_whole(path, json.dumps(outcome.to_json(), indent=1) + "\n")
    except OSError as error:
        say_once("outcome", f"cannot write {path}: {error.strerror}; the verdict is exit code {outcome.exit_code}")
