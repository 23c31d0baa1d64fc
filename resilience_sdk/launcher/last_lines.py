"""Closing words: the line about a restart, and the last lines of a job, for a person."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.attribution.taxonomy import UNKNOWN
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.incidents import count_words
from resilience_sdk.launcher.restart_policy import Decision
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.outcome import TO_RESUME, Outcome, hint_of, to_resume

_MAX_SHOWN = 4  # checkpoints that are passed over

_NAMES = {
    JobVerdict.FINISHED: "finished",
    JobVerdict.PREEMPTED: "preempted",
    JobVerdict.HARDWARE: "stopped for hardware",
    JobVerdict.STOP: "stopped, not to be retried",
    JobVerdict.GIVE_UP: "failed",
    JobVerdict.INTERRUPTED: "interrupted",
}


@attrs.frozen
class JobOutcome:
    """Where `outcome.json` of a job stands once one of its nodes has written it; `job` is the job's key."""

    path: Path
    job: str

    def exit_code(self) -> int | None:
        """Return the exit code in it if this job wrote it (an older one is removed at its start)."""
        try:
            data: Mapping[str, Any] = json.loads(read_text(self.path))
            return int(data["exit_code"]) if data["job"] == self.job else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def closing_lines(outcome: Outcome, summary: Sequence[str] = (), page: Path | None = None) -> list[str]:
    """Return what a person reads last: what happened, how the time was spent, what was lost, what to do, how to resume.

    `summary`: the lines of `report.closing` on the run; `page`: its report, where one was written.
    """
    run_dir = shlex.quote(str(outcome.run_dir))
    name = _NAMES.get(outcome.verdict, outcome.verdict.value)
    told = outcome.reason if outcome.reason.startswith(name) else f"{name}: {outcome.reason}"
    lines = [f"{told} (exit code {outcome.exit_code})"]
    if outcome.verdict is JobVerdict.FINISHED:
        place = f"page: {page}" if page else f"run directory: {outcome.run_dir} (its page: resilience report {run_dir})"
        return [*lines, *summary, place]
    if outcome.what:
        lines.append(f"last fault: {outcome.what}")
    if outcome.incidents:
        hangs = [known for known in outcome.incidents if known.endswith("-hang")]
        shown = hangs[-1] if outcome.stood is not None and hangs else outcome.incidents[-1]
        report = os.path.join(outcome.run_dir, "incidents", shown, "report.md")
        lines.append(f"report: {report} (all: resilience why {run_dir})")
    lines += summary
    told_lost = outcome.verdict in (JobVerdict.PREEMPTED, JobVerdict.INTERRUPTED)
    if outcome.checkpoint is not None or not told_lost:
        lines.append(state_line(outcome.checkpoint, outcome.run_dir, outcome.not_taken, told_lost=told_lost))
    if hint := outcome.advice or hint_of(outcome.verdict):
        lines.append(f"what to do: {hint}")
    if outcome.resume:
        lines.append(to_resume(outcome.verdict, outcome.resume, outcome.checkpoint))
    if page is not None:
        lines.append(f"page: {page}")
    return lines


def leaving_lines(outcome: Outcome) -> list[str]:
    """Return what a person reads last of a node that leaves a job which goes on without it."""
    report = [f"report: resilience why {shlex.quote(str(outcome.run_dir))}"] if outcome.incidents else []
    return [
        f"this node leaves the job: {outcome.reason} (exit code {outcome.exit_code})",
        *report,
        "what to do: have this node checked; the others go on without it, from the newest checkpoint",
    ]


def may_wrap(line: str) -> bool:
    """Tell whether a terminal's lines may break this one: not a path or a command that is to be copied."""
    return not line.startswith((*TO_RESUME, "report:", "page:", "run directory:"))


def state_line(checkpoint: int | None, run_dir: str, not_taken: Sequence[str] = (), *, told_lost: bool = False) -> str:
    """Say what of the work is kept; `told_lost`: another line says how much is lost.

    `not_taken`: checkpoints that are there and that no resume takes, each with the reason.
    """
    bad = _shown(not_taken)
    if checkpoint is None and not_taken:
        return f"no checkpoint in {run_dir} can be resumed: {bad}"
    if checkpoint is None:
        return f"nothing saved by the SDK in {run_dir}: what the script did not save itself is lost"
    rest = "" if told_lost else "; whatever came after it is to be done again"
    newer = f" (not taken: {bad})" if not_taken else ""
    return f"saved: the checkpoint after {count_words(checkpoint)} in {run_dir}{rest}{newer}"


def _shown(not_taken: Sequence[str]) -> str:
    more = f"; and {len(not_taken) - _MAX_SHOWN} more" if len(not_taken) > _MAX_SHOWN else ""
    return "; ".join(not_taken[:_MAX_SHOWN]) + more


def restart_line(decision: Decision, checkpoint: int | None, not_taken: Sequence[str] = ()) -> str:
    """Say that the ranks are started again, and what they find; `not_taken` as in `state_line`."""
    wait = f" in {decision.delay_s:.0f} s" if decision.delay_s >= 1 else ""
    if decision.waits_for is not None:
        wait += f" and after waiting for {decision.waits_for}"
    found = (
        f"there is a checkpoint after {count_words(checkpoint)} to resume from"
        if checkpoint is not None
        else f"none of the checkpoints can be resumed: {_shown(not_taken)}"
        if not_taken
        else "nothing saved by the SDK to resume from, so the script starts over unless it loads its own"
    )
    return f"starting the ranks again{wait} ({decision.reason}): {found}"


def fault_line(headline: str, cause: str) -> str:
    """Return what happened and the name of its cause; what that means stands in the report."""
    return headline if cause == UNKNOWN or cause in headline else f"{headline}: {cause}"
