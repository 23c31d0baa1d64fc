"""A step on a GPU: what the adapter of plain PyTorch adds, what timed kernels cost, how long a save holds it up.

Beside NVRx's `straggler.Detector`, where its Python is named, and torch's own save in the background. Two models: one
whose steps take as long as their launching does, on which all that a thread does beside shows, and a transformer that
keeps the device busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from tests.bench import processes
from tests.bench.figures import Context, Figure

_MODELS = {"launched": "40 small layers", "computed": "transformer, 151 M parameters"}


def measure(context: Context) -> list[Figure]:
    """Measure where there is a device; elsewhere there is nothing to tell."""
    if not torch.cuda.is_available():
        return []
    device = torch.cuda.get_device_name()
    ours = _run(context, sys.executable, "ours")
    figures = []
    for kind, model in _MODELS.items():
        figures += [
            Figure(f"{model}: a step", "torch", "ms", _ms(ours[kind]["step"]), note=device),
            Figure(f"{model}: attach adds to it", "ours", "ms", _ms(ours[kind]["added"])),
            Figure(f"{model}: a step whose kernels are timed takes more", "ours", "ms", _ms(ours[kind]["window"])),
        ]
    if context.nvrx_python is not None:
        try:
            theirs = _run(context, context.nvrx_python, "nvrx")
        except subprocess.CalledProcessError:
            theirs = {kind: {"added": []} for kind in _MODELS}
        for kind, model in _MODELS.items():
            added, note = _ms(theirs[kind]["added"]), "" if theirs[kind]["added"] else "it did not run"
            figures.append(Figure(f"{model}: the detector adds", "nvrx", "ms", added, note=note))
    saves = _run(context, sys.executable, "saves")
    note = f"{saves['megabytes'][0]:.0f} MB"
    return [
        *figures,
        Figure("save at once, stall", "ours", "ms", _ms(saves["at once"]), note=note),
        Figure("save in the background, stall", "ours", "ms", _ms(saves["background"]), note=note),
        Figure("dcp.async_save, stall", "torch", "ms", _ms(saves["torch in the background"]), note=note),
    ]


def _run(context: Context, python: str, way: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(processes.PROGRAMS / "on_gpu.py"), way, str(context.repeats(9, 3)), str(context.scratch / way)],
        env=processes.environment(
            RESILIENCE_RUN_DIR=str(context.scratch / "run"),
            CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        ),
        cwd=context.scratch,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(1000 * each for each in seconds)
