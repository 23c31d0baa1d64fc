"""The preflight for a launcher: `python -m resilience_sdk.health` reads its task from standard input, tells a report.

The launcher starts it by name, because it is on the same floor; what a driver does to this process is not the
launcher's. The task is a JSON object: `settings` (`Settings.to_json`), `run_dir`, `rendezvous`, `local_ranks`, `nodes`
(how many the job has at most), `comes_s` (how long a rendezvous that is not there yet is waited for) and `answer` (see
`answering`).
"""

from __future__ import annotations

import sys

import attrs

from resilience_sdk import environ
from resilience_sdk.console import say
from resilience_sdk.health import probes
from resilience_sdk.health.answering import read_task, tell
from resilience_sdk.health.checkup import examine, job_context
from resilience_sdk.health.runner import run_probes
from resilience_sdk.health.waiting import rendezvous_there
from resilience_sdk.health.watching import to_event
from resilience_sdk.settings import settings_from_json

# A person waits for the doctor; a job that is refused for a machine that was only busy has lost its place in the queue.
_PATIENCE = 4.0


def main() -> int:
    """Tell a report as JSON, with `events` for the journal; raises what makes that impossible."""
    task = read_task()
    settings = settings_from_json(task["settings"])
    context = job_context(
        environ.environment(),
        settings,
        run_dir=task["run_dir"],
        rendezvous=task["rendezvous"],
        local_ranks=task["local_ranks"],
    )
    context = attrs.evolve(context, nodes=task["nodes"])
    report = examine(context, settings, compute=True, patience=_PATIENCE)
    rendezvous = attrs.evolve(probes.RENDEZVOUS, deadline_s=_PATIENCE * probes.RENDEZVOUS.deadline_s)
    findings = rendezvous_there(report.findings, lambda: run_probes([rendezvous], context), task["comes_s"], say)
    report = attrs.evolve(report, findings=findings)
    events = [to_event(finding) for finding in report.findings]
    tell(task, {**report.to_json(), "events": events})
    return 0


if __name__ == "__main__":
    sys.exit(main())
