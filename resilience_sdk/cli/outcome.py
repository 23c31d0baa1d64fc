"""`resilience outcome`: how the last job of a run directory ended.

A foreign launcher hides our exit code (torchrun leaves with 1 whatever happened); this tells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.cli.common import (
    aligned,
    open_run_dir,
    print_json,
    print_lines,
    read_json_object,
    reading_parser,
    resume_row,
    when,
)
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.incidents import count_words

_TEXTS = ("verdict", "reason", "what", "resume", "job", "node", "run_dir", "stood")
_COUNTS = ("exit_code", "attempts", "checkpoint")
_TIMES = ("started_at", "ended_at")
KEYS = (*_TEXTS, *_COUNTS, *_TIMES, "incidents", "free")


def main(argv: Sequence[str]) -> int:
    """Print the outcome and return 0; with `--exit-code` the job's own code; 2 when there is none."""
    parser = reading_parser("outcome", "Print verdict and exit code of the last job of a run directory.")
    parser.add_argument("--exit-code", action="store_true", help="leave with the exit code of the job")
    options = parser.parse_args(argv)
    run_dir = open_run_dir(options.run_dir)
    outcome = read_outcome(run_dir)
    if outcome is None:
        raise RunDirectoryError(_why_none(run_dir))
    if options.json:
        print_json(outcome)
    else:
        print_lines(render(outcome))
    if not options.exit_code:
        return 0
    code = outcome["exit_code"]
    if code is None:
        raise ConfigError(f"{run_dir.outcome} holds no exit code")
    return code & 0xFF  # type: ignore[no-any-return]


def read_outcome(run_dir: RunDirectory) -> dict[str, Any] | None:
    """Return the stable keys of `outcome.json` (null where a value is missing or misshapen).

    Where only the finished flag is there, that is the outcome. None when the job has not ended.

    Raises:
        ConfigError: The file cannot be read.
    """
    data = read_json_object(run_dir.outcome)
    if data is None:
        if not run_dir.is_finished():
            return None
        data = {"verdict": "finished", "exit_code": 0, "reason": "the finished flag is set"}
    outcome: dict[str, Any] = {key: data.get(key) for key in KEYS}
    for key in _TEXTS:
        outcome[key] = outcome[key] if isinstance(outcome[key], str) else None
    for key in _COUNTS:
        outcome[key] = outcome[key] if type(outcome[key]) is int else None
    for key in _TIMES:
        outcome[key] = outcome[key] if type(outcome[key]) in (int, float) else None
    outcome["free"] = outcome["free"] is True
    incidents = outcome["incidents"] if isinstance(outcome["incidents"], list) else []
    outcome["incidents"] = [name for name in incidents if isinstance(name, str)]
    outcome["run_dir"] = outcome["run_dir"] or str(run_dir.path)
    return outcome


def render(outcome: dict[str, Any]) -> list[str]:
    """Return the outcome as lines for a person."""
    code = "unknown" if outcome["exit_code"] is None else outcome["exit_code"]
    ended = "" if outcome["ended_at"] is None else f", ended {when(outcome['ended_at'])}"
    rows: list[tuple[str, object]] = [("outcome", f"{outcome['verdict'] or 'unknown'}, exit code {code}{ended}")]
    for name, key in (
        ("reason", "reason"),
        ("last fault", "what"),
        ("attempts", "attempts"),
        ("checkpoint", "checkpoint"),
        ("run directory", "run_dir"),
    ):
        if outcome[key] is not None:
            rows.append((name, f"after {count_words(outcome[key])}" if key == "checkpoint" else outcome[key]))
    rows += resume_row(outcome)
    if outcome["incidents"]:
        rows.append(("incidents", ", ".join(outcome["incidents"])))
    return aligned(rows)


def _why_none(run_dir: RunDirectory) -> str:
    path = run_dir.path
    if holder := current_holder(run_dir):
        return f"{path} has no outcome yet: job {holder.job} is running; see resilience status {path}"
    if told := supervised_end(read_journal(run_dir.journal).events):
        return f"{path} has no outcome: {told}"
    return (
        f"{path} has no outcome: its job was killed together with its launcher, or ran under one that does "
        f"not write it; resilience status {path} tells what is known"
    )


def supervised_end(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the last command under `resilience supervise` ended, where that is the last thing that happened.

    A command that uses nothing of the SDK leaves no outcome of its own.
    """
    last = events[-1] if events else {}
    if last.get("event") != Event.DECISION.value or last.get("what") != "supervise" or last.get("exit_code") is None:
        return None
    return f"its command recorded nothing; resilience supervise ended with {last['exit_code']}: {last.get('reason')}"
