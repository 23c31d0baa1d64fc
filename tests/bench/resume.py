"""A resume proves itself: what fingerprints and witnesses add to a step, and digests to a save and a resume."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench import processes
from tests.bench.figures import Context, Figure

_STEP_US = 20.0
_DIGESTS_MS = 20.0


def measure(context: Context) -> list[Figure]:
    """Measure steps with usual batches, and the digests of 3000 tensors."""
    done = subprocess.run(
        [sys.executable, str(processes.PROGRAMS / "witnessed.py"), str(context.repeats(15, 5))],
        env=processes.environment(RESILIENCE_RUN_DIR=str(context.scratch / "run")),
        cwd=context.scratch,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    figures = [
        Figure(f"witness of a step, {name}", "ours", "us", tuple(ns / 1000 for ns in samples), _STEP_US)
        for name, samples in found["steps"].items()
    ]
    digests = tuple(ns / 1e6 for ns in found["digests"])
    return [*figures, Figure("digests of a state of 3,000 tensors", "ours", "ms", digests, _DIGESTS_MS)]
