"""`import resilience_sdk` in fresh interpreters, and that it brings no torch along."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench import processes
from tests.bench.figures import Context, Figure

_TARGET_MS = 60.0
_PROGRAM = """
import sys, time
start = time.perf_counter()
import {module}
took = time.perf_counter() - start
heavy = [name for name in ("torch", "numpy", "pynvml", "structlog") if name in sys.modules]
import json
print(json.dumps([took * 1000, heavy]))
"""


def measure(context: Context) -> list[Figure]:
    """Measure the package alone, with its first names resolved, and NVRx's part for the same purpose."""
    repeats = context.repeats(15, 5)
    return [
        _figure("import", "ours", sys.executable, "resilience_sdk", repeats, _TARGET_MS),
        _figure(
            "import with heartbeat, straggler",
            "ours",
            sys.executable,
            "resilience_sdk; from resilience_sdk import heartbeat, straggler",
            repeats,
            None,
        ),
        *_nvrx(context),
    ]


def _nvrx(context: Context) -> list[Figure]:
    if context.nvrx_python is None:
        return []
    module = "nvidia_resiliency_ext.fault_tolerance"
    return [_figure("import", "nvrx", context.nvrx_python, module, context.repeats(5, 2), None)]


def _figure(name: str, system: str, python: str, module: str, repeats: int, target: float | None) -> Figure:
    samples, heavy = [], set()
    for number in range(repeats + 1):
        done = subprocess.run(
            [python, "-W", "ignore", "-c", _PROGRAM.format(module=module)],
            env=processes.environment(),
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        took, found = json.loads(done.stdout)
        if number:  # the first one writes the byte code and fills the page cache
            samples.append(took)
            heavy.update(found)
    note = f"brings {', '.join(sorted(heavy))}" if heavy else "brings no torch, numpy, pynvml, structlog"
    broken = target is not None and bool(heavy)
    return Figure(name, system, "ms", tuple(samples), 0.0 if broken else target, note=note)
