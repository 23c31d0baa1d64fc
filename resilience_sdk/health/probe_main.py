"""The process of one probe: reads its task, writes one line for each finding.

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
from collections.abc import Iterator
from typing import Any, BinaryIO

from resilience_sdk.health.findings import Finding, own_fault, unseen
from resilience_sdk.health.probes import Context

FINDING = "finding"
BEGUN_LINE = b'{"begun": true}\n'
"""Comes first: whatever goes wrong before it lies in Python, in the SDK or in how they are installed."""
DONE_LINE = b'{"done": true}\n'
# At this part of its time the process writes where it is, and after that many times it ends itself, should whoever
# started it be gone.
_STACKS_AT = 0.85
_OUTLIVES = 1.5
_MIN_S = 0.05


def main() -> None:
    """Run one probe; never returns, so that no driver's exit handler can hang the process."""
    task = json.load(sys.stdin)
    # The monotonic clock is the machine's: what starting this process took has already passed.
    left_s = max(_MIN_S, float(task["ends"]) - time.monotonic())
    task["context"]["deadline_s"] = left_s
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _OUTLIVES * left_s)
    out = _own_output()
    # Of a crash the stack of the thread that crashed: reading those of threads that go on may crash itself.
    faulthandler.enable(all_threads=False)
    faulthandler.dump_traceback_later(_STACKS_AT * left_s)
    code = 0
    try:
        out.write(BEGUN_LINE)
        for finding in _findings(task):
            out.write(json.dumps({FINDING: finding.to_json()}, default=str).encode() + b"\n")
        out.write(DONE_LINE)
    except BrokenPipeError:
        code = 1  # nobody reads any more
    os._exit(code)


def _findings(task: dict[str, Any]) -> Iterator[Finding]:
    module, _, function = task["function"].partition(":")
    try:
        probe = getattr(importlib.import_module(module), function)
        yield from probe(Context(**task["context"]))
    except Exception as error:  # noqa: BLE001 - a mistake is a finding too: that this could not be looked at
        what = f"{type(error).__name__}: {error}"
        evidence = f"the probe itself failed: {what}{_innermost(error)}"
        name, subject = task["name"], task["context"]["only"]
        if module.partition(".")[0] == __name__.partition(".")[0]:
            yield own_fault(name, subject, evidence, what)
        else:
            yield unseen(name, subject, evidence, f"mend the probe: {module} is no part of resilience_sdk")


def _innermost(error: BaseException) -> str:
    import traceback  # late: only a mistake needs it

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({os.path.basename(frame.filename)}:{frame.lineno} {frame.name})"


def _own_output() -> BinaryIO:
    """Keep standard output for findings alone: what a library prints goes to standard error."""
    out = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115 - open until the process ends
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
