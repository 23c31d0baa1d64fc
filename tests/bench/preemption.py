"""What it costs to ask before each step whether to stop: ours, beside what others do, in one run of two ranks.

Beside `preemption.check()` stand an all_reduce of one flag per step, which is what loops of one's own do, and the
broadcast that Lightning makes before each batch. That one is Lightning's own method where `LIGHTNING_PATH` names a
folder with it (`pip install --no-deps --target FOLDER lightning lightning-utilities torchmetrics tqdm packaging`),
else the same three calls of torch.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tests.bench import processes
from tests.bench.figures import Context, Figure

_CHECK_US = 0.1


def measure(context: Context) -> list[Figure]:
    """Measure with a monitor, and the check once more without one."""
    found = _run(context, "monitor")
    without = _run(context, "ranks", RESILIENCE_PAGE_DIR="/dev/null/nowhere")
    lightning = found["lightning"] or "its calls, not itself"
    return [
        Figure("stop check a step", "ours", "us", tuple(found["check"]), _CHECK_US, note="nothing pending"),
        Figure("stop check a step", "ours, no monitor", "us", tuple(without["check"]), note="an all_reduce a second"),
        Figure("stop check a step", "all_reduce", "us", tuple(found["all_reduce"]), note="gloo, one flag"),
        Figure("stop check a step", "lightning", "us", tuple(found["broadcast"]), note=f"gloo, {lightning}"),
    ]


def _run(context: Context, name: str, **env: str) -> dict[str, Any]:
    out, log = context.scratch / f"{name}.json", context.scratch / f"{name}.log"
    counts = [str(context.repeats(21, 5)), str(context.repeats(500, 100)), str(context.repeats(200_000, 50_000))]
    program = [str(processes.PROGRAMS / "stop_checks.py"), str(out), name, *counts]
    lightning = {"LIGHTNING_PATH": os.environ.get("LIGHTNING_PATH", "")}
    own = processes.environment(RESILIENCE_RUN_DIR=str(context.scratch / f"run-{name}"), **lightning, **env)
    code = processes.run([*processes.torchrun("--nproc-per-node", "2"), *program], own, log, 180)
    if code != 0:
        raise RuntimeError(f"the ranks ended with {code}; see {log}:\n{log.read_text()[-2000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result
