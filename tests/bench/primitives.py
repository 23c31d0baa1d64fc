"""`with heartbeat()` and `with section()`: in a tight loop, and once per millisecond."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench import processes
from tests.bench.figures import Context, Figure

_MOST_TIMES_EMPTY = 6.0
_CHECK_US = 0.1
_TARGETS_US = {"heartbeat": 0.6, "section": 1.0}
_WORK_US = 1.0


def measure(context: Context) -> list[Figure]:
    """Measure ours, an empty `with` beside it, and NVRx where it is there."""
    repeats, loops = context.repeats(11, 5), context.repeats(200_000, 50_000)
    found = json.loads(
        subprocess.run(
            [sys.executable, str(processes.PROGRAMS / "primitives.py"), str(repeats), str(loops)],
            env=processes.environment(RESILIENCE_RUN_DIR=str(context.scratch / "run")),
            cwd=context.scratch,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        ).stdout
    )
    microseconds = {name: tuple(ns / 1000 for ns in samples) for name, samples in found.items()}
    empty = microseconds["empty"]
    figures = [Figure("empty with, tight", "python", "us", microseconds["empty"])]
    for name, target in _TARGETS_US.items():
        samples = microseconds[name]
        figures.append(Figure(f"{name}, tight", "ours", "us", samples, target))
        ratios = tuple(ours / least for ours, least in zip(samples, empty, strict=True))
        figures.append(Figure(f"{name} / empty with", "ours", "x", ratios, _MOST_TIMES_EMPTY))
    figures.append(Figure("beat(), tight", "ours", "us", microseconds["beat"]))
    figures.append(Figure("straggler.work(), tight", "ours", "us", microseconds["work"], _WORK_US))
    figures.append(Figure("preemption.check(), tight", "ours", "us", microseconds["check"], _CHECK_US))
    figures += [
        Figure(f"{name}, paced", system, "us", microseconds[f"{name} paced"])
        for name, system in (("empty", "python"), ("heartbeat", "ours"), ("section", "ours"))
    ]
    return figures + _nvrx(context)


def _nvrx(context: Context) -> list[Figure]:
    if context.nvrx_python is None:
        return []
    out, config = context.scratch / "nvrx.json", context.scratch / "nvrx.yaml"
    config.write_text("fault_tolerance:\n  rank_section_timeouts: {step: 600}\n  rank_out_of_section_timeout: 600\n")
    options = ["--nproc-per-node=1", f"--ft-cfg-path={config}"]
    program = [str(processes.PROGRAMS / "nvrx_primitives.py"), str(out), "5", "2000"]
    command = processes.nvrx_launcher(context.nvrx_python, *options, *program)
    processes.run(command, processes.environment(), context.scratch / "nvrx.log", 120)
    if not out.exists():
        return [Figure("heartbeat, tight", "nvrx", "us", (), note="it did not run")]
    return [
        Figure(f"{name}, tight", "nvrx", "us", tuple(ns / 1000 for ns in samples))
        for name, samples in json.loads(out.read_text()).items()
    ]
