"""`resilience outcome`: how the last job of a run directory ended.

A foreign launcher hides our exit code (torchrun leaves with 1 whatever happened); this tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilience_sdk.cli.common import (
    aligned,
    open_run_dir,
    page_row,
    print_json,
    print_lines,
    reading_parser,
    resume_row,
)
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.resume_proof import proof_of
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import when
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.incidents import count_words
from resilience_sdk.report.outcome import read_outcome, supervised_end
from resilience_sdk.report.run_view import look_at
from resilience_sdk.report.standstills import newest_sentence


def main(argv: Sequence[str]) -> int:
    """Print the outcome and return 0; with `--exit-code` the job's own code; 2 when there is none."""
    parser = reading_parser("outcome", "Print verdict and exit code of the last job of a run directory.")
    parser.add_argument("--exit-code", action="store_true", help="leave with the exit code of the job")
    options = parser.parse_args(argv)
    run_dir = open_run_dir(options.run_dir)
    outcome = read_outcome(run_dir)
    if outcome is None:
        raise RunDirectoryError(_why_none(run_dir))
    view = look_at(run_dir)
    proof = proof_of(view.events)
    if options.json:
        print_json({**outcome, "resume_check": proof})
    else:
        stood = newest_sentence(view.account())
        told = [("stood still", stood)] if stood else []
        told += [("resumed", proof["text"])] if proof is not None and proof["text"] else []
        print_lines([*render(outcome), *aligned([*told, page_row(run_dir)])])
    if not options.exit_code:
        return 0
    code = outcome["exit_code"]
    if code is None:
        raise ConfigError(f"{run_dir.outcome} holds no exit code")
    return code & 0xFF  # type: ignore[no-any-return]


def render(outcome: dict[str, Any]) -> list[str]:
    """Return the outcome as lines for a person."""
    code = "unknown" if outcome["exit_code"] is None else outcome["exit_code"]
    ended = "" if outcome["ended_at"] is None else f", ended {when(outcome['ended_at'])}"
    rows: list[tuple[str, object]] = [("outcome", f"{outcome['verdict'] or 'unknown'}, exit code {code}{ended}")]
    for name, key in (
        ("reason", "reason"),
        ("last fault", "what"),
        ("attempts", "attempts"),
        ("to do", "advice"),
        ("checkpoint", "checkpoint"),
        ("run directory", "run_dir"),
    ):
        if outcome[key] is not None:
            rows.append((name, f"after {count_words(outcome[key])}" if key == "checkpoint" else outcome[key]))
    rows += [("not taken", text) for text in outcome["not_taken"]]
    rows += resume_row(outcome)
    if outcome["incidents"]:
        rows.append(("incidents", ", ".join(outcome["incidents"])))
    return aligned(rows)


def _why_none(run_dir: RunDirectory) -> str:
    path = run_dir.path
    if holder := current_holder(run_dir):
        return f"{path} has no outcome yet: job {holder.job} is running; see resilience status {path}"
    if told := supervised_end(look_at(run_dir).events):
        return f"{path} has no outcome: {told}"
    return (
        f"{path} has no outcome: its job was killed together with its launcher, or ran under one that does "
        f"not write it; resilience status {path} tells what is known"
    )
