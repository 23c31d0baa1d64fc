"""`resilience goodput`: what each second of a run's wall time went into, with the definition beside each number."""

from __future__ import annotations

from collections.abc import Sequence

from resilience_sdk.cli.common import open_run_dir, print_json, print_lines, reading_parser
from resilience_sdk.core.words import duration, when
from resilience_sdk.goodput.buckets import DEFINITIONS, Bucket
from resilience_sdk.goodput.step_time import measures_data
from resilience_sdk.goodput.summary import RATIOS, Summary
from resilience_sdk.report.run_view import look_at

_MOST_ATTEMPTS = 12
_UNMEASURED = (
    "no section says when the loop waits for its data, so that is in outside or productive: an adapter, "
    "straggler.iterate(loader) or Run.steps() tells it apart"
)


def main(argv: Sequence[str]) -> int:
    """Print the account and return 0; raises RunDirectoryError for a directory that cannot be read."""
    parser = reading_parser(
        "goodput", "Print where the time of a run went, over all its jobs.", schema="docs/goodput.md"
    )
    options = parser.parse_args(argv)
    run_dir = open_run_dir(options.run_dir)
    view = look_at(run_dir)
    summary, is_running, problems = view.account(), view.is_running, view.problems
    measured = measures_data(view.events)
    if options.json:
        told = {"run_dir": str(run_dir.path), "running": is_running, **summary.to_json(), "data_measured": measured}
        print_json({**told, "problems": problems})
    else:
        lines = render(str(run_dir.path), summary, is_running=is_running)
        notes = [*([_UNMEASURED] if measured is False else []), *problems]
        print_lines([*lines, *(f"note           {note}" for note in notes)])
    return 0


def render(run_dir: str, summary: Summary, *, is_running: bool) -> list[str]:
    """Return the account as lines for a person."""
    if not summary.attempts:
        return [f"run directory  {run_dir}", "nothing has run in it yet"]
    so_far = ", so far" if is_running else ""
    lines = [f"run directory  {run_dir}", f"wall time      {duration(summary.wall_s)}{so_far}", ""]
    for bucket in Bucket:
        seconds = summary.buckets[bucket]
        share = seconds / summary.wall_s if summary.wall_s else 0.0
        told, part = duration(seconds), f"{share:.1%}"
        if bucket in summary.unknown:
            told, part = "unknown", ""  # in productive
        lines.append(f"{bucket.value:<11} {told:>11} {part:>7}  {DEFINITIONS[bucket]}")
    lines.append("")
    lines += [f"{name:<11} {f'{value:>11}':<19}  {about}" for name, value, about in _ratios(summary)]
    if len(summary.attempts) > 1:
        lines += ["", *_attempts(summary)]
    return lines


def _ratios(summary: Summary) -> list[tuple[str, str, str]]:
    low_s, high_s = summary.mttf_between_s
    between = f"{duration(low_s)} to {duration(high_s)}" if high_s is not None else f"at least {duration(low_s)}"
    injected = f" ({summary.injected} injected, not counted)" if summary.injected else ""
    lost = "unknown" if summary.lost_steps is None else str(summary.lost_steps)
    why = "steps are not counted over attempts" if summary.lost_steps is None else "steps done again, over all attempts"
    return [
        ("goodput", f"{summary.at_most}{_percent(summary.goodput)}", RATIOS["goodput"]),
        ("ETTR", f"{summary.at_most}{_percent(summary.ettr)}", RATIOS["ettr"]),
        (
            "MTTF",
            "no fault" if summary.mttf_s is None else duration(summary.mttf_s),
            f"{RATIOS['mttf_s']}: {between}{injected}",
        ),
        ("MTTR", "-" if summary.mttr_s is None else duration(summary.mttr_s), RATIOS["mttr_s"]),
        ("lost steps", lost, why),
    ]


def _attempts(summary: Summary) -> list[str]:
    shown = summary.attempts[-_MOST_ATTEMPTS:]
    hidden = len(summary.attempts) - len(shown)
    lines = [f"the last {len(shown)} of {len(summary.attempts)} attempts (--json has them all):"] if hidden else []
    jobs = list(dict.fromkeys(attempt["job"] for attempt in summary.attempts))
    for attempt in shown:
        parts = sorted(((seconds, name) for name, seconds in attempt["buckets"].items() if seconds > 0), reverse=True)
        told = ", ".join(f"{name} {duration(seconds)}" for seconds, name in parts)
        job = f"job {jobs.index(attempt['job']) + 1}, " if len(jobs) > 1 else ""
        lines.append(f"{job}attempt {attempt['attempt']} from {when(attempt['began_at'])}: {told or 'no time'}")
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
