"""The process of one probe: reads its task from standard input, writes one JSON line for each finding.

Started by `runner` and by nobody else. It must be cheap to start: no torch, nothing that its probe does not need.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import Context

FINDING = "finding"
DONE_LINE = b'{"done": true}\n'
# At this part of its time the process writes where it is, and after that many times it ends itself, should whoever
# started it be gone.
_STACKS_AT = 0.85
_OUTLIVES = 1.5
_LEAST_S = 0.05


def main() -> None:
    """Run one probe; never returns, so that no driver's exit handler can hang the process."""
    task = json.load(sys.stdin)
    # The monotonic clock is the machine's: what starting this process took has already passed.
    left_s = max(_LEAST_S, float(task["ends"]) - time.monotonic())
    task["context"]["deadline_s"] = left_s
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _OUTLIVES * left_s)
    out = _own_output()
    # Of a crash the stack of the thread that crashed: reading those of threads that go on may crash itself.
    faulthandler.enable(all_threads=False)
    faulthandler.dump_traceback_later(_STACKS_AT * left_s)
    code = 0
    try:
        for finding in _findings(task):
            out.write(json.dumps({FINDING: finding.to_json()}, default=str).encode() + b"\n")
        out.write(DONE_LINE)
    except BrokenPipeError:
        code = 1  # nobody reads any more
    os._exit(code)


def _findings(task: dict[str, Any]) -> Iterator[Finding]:
    name = task["name"]
    try:
        yield from _function(task["function"])(Context(**task["context"]))
    except Exception as error:  # noqa: BLE001 - our own mistake is a finding too: that this could not be looked at
        place = _innermost(error)
        yield Finding(
            probe=name,
            check="probe",
            subject=task["context"]["only"],
            status=Status.UNAVAILABLE,
            evidence=f"the probe itself failed: {type(error).__name__}: {error}{place}",
            cure="report this line",
        )


def _function(name: str) -> Callable[[Context], Iterator[Finding]]:
    module, _, attribute = name.partition(":")
    found: Callable[[Context], Iterator[Finding]] = getattr(
        importlib.import_module(f"resilience_sdk.health.{module}"), attribute
    )
    return found


def _innermost(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno} {code.co_name})"


def _own_output() -> BinaryIO:
    """Keep standard output for findings alone: what a library prints goes to standard error."""
    out = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115 - open until the process ends
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
