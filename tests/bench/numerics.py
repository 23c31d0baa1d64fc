"""`numerics.check` on the CPU, beside the other ways to look for NaN in a training step."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench import processes
from tests.bench.figures import Context, Figure


def measure(context: Context) -> list[Figure]:
    """Measure one call each in a tight loop, and a step of a small model with and without anomaly detection."""
    rounds, loops = context.repeats(15, 5), context.repeats(20_000, 5_000)
    done = subprocess.run(
        [sys.executable, str(processes.PROGRAMS / "checked.py"), str(rounds), str(loops)],
        env=processes.environment(RESILIENCE_RUN_DIR=str(context.scratch / "run")),
        cwd=context.scratch,
        stdout=subprocess.PIPE,
        check=True,
        timeout=180,
    )
    found = {name: tuple(ns / 1000 for ns in samples) for name, samples in json.loads(done.stdout).items()}
    return [
        Figure("numerics.check(loss, grad_norm)", "ours", "us", found["check"], 50.0),
        Figure("torch.isfinite(loss).item()", "torch", "us", found["isfinite"]),
        Figure("clip_grad_norm_, 4 parameters", "torch", "us", found["clip"]),
        Figure("the same with error_if_nonfinite", "torch", "us", found["clip_checked"]),
        Figure("a step, 4 parameters", "torch", "us", found["step"]),
        Figure("the same under detect_anomaly", "torch", "us", found["anomaly"]),
    ]
