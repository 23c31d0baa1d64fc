"""`resilience doctor` on this machine: it is promised within 5 s where nothing hangs and no GPU driver is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from tests.bench import processes
from tests.bench.figures import Context, Figure

_TARGET_S = 5.0


def measure(context: Context) -> list[Figure]:
    """Measure wall time, and processor time of the doctor with all its probes."""
    wall, processor, stopping = [], [], 0
    for _ in range(context.repeats(20, 3)):
        before, began = _processor_s(), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "resilience_sdk", "doctor", "--json", "--run-dir", str(context.scratch / "run")],
            env=processes.environment(),
            stdout=subprocess.PIPE,
            timeout=120,
        )
        wall.append(time.monotonic() - began)
        processor.append(_processor_s() - before)
        stopping += not json.loads(done.stdout)["ok"]
    note = f"{stopping} of {len(wall)} found what stops a job here" if stopping else "a job can start here"
    return [
        Figure("doctor", "ours", "s", tuple(wall), _TARGET_S, _TARGET_S, note=note),
        Figure("doctor, processor time", "ours", "s", tuple(processor), note="with its probes"),
    ]


def _processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
