"""The outcome of a job: `outcome.json` for programs, and what a person is to do.

Written by our launcher, and by the monitor where a foreign launcher's exit code hides the verdict.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.json_records import to_values
from resilience_sdk.core.redaction import redact
from resilience_sdk.postmortem.exit_codes import JobVerdict


@attrs.frozen
class Outcome:
    """The end of one job. Times are Unix seconds."""

    verdict: JobVerdict
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
    stood: str | None = None
    """What stood still when somebody ended the job, in words: to start it again is a retry that counts."""
    free: bool = False
    """It ended for a hang that costs nothing of a budget, so a retry does not count."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of `outcome.json`: every key always there, null for what is not known."""
        return to_values(self)


_HINTS = {
    JobVerdict.STOP: "fix the program, then run it again",
    JobVerdict.GIVE_UP: "find the cause before you run it again",
    JobVerdict.HARDWARE: "requeue it without that node",
    JobVerdict.PREEMPTED: "requeue it",
}
_TO_RESUME = {
    JobVerdict.STOP: "to run it again, once it is repaired",
    JobVerdict.HARDWARE: "to resume on another node",
}
TO_RESUME = ("to resume", "to run it again")
"""How the lines begin that end with a command to copy."""


def hint_of(verdict: str) -> str | None:
    """Return what to do after a verdict (`Verdict` or its value); None where there is nothing to say."""
    return _HINTS.get(verdict)  # type: ignore[call-overload, no-any-return]


def to_resume(verdict: JobVerdict, command: str) -> str:
    """Return the line with the command that goes on, and when or where it makes sense."""
    return f"{_TO_RESUME.get(verdict, 'to resume')}: {command}"


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write `outcome.json`, whole or not at all, without secrets; a full disk is said and not raised."""
    try:
        write_whole(path, json.dumps(redact(outcome.to_json()), indent=1) + "\n")
    except OSError as error:
        say_once("outcome", f"cannot write {path}: {error.strerror}; the verdict is exit code {outcome.exit_code}")
