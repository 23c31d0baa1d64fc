"""`straggler.attach`: what its hooks add to a training step, and a section while the monitor collects."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench import processes
from tests.bench.figures import Context, Figure

_SHARDED = 40  # as in programs/attached.py
_SECTION_US = 1.0


def measure(context: Context) -> list[Figure]:
    """Measure a model of 2 parameters, one of 1,000, and one of 40 sharded layers, with hooks and without in turns."""
    rounds, loops = context.repeats(15, 5), context.repeats(200_000, 50_000)
    done = subprocess.run(
        [sys.executable, str(processes.PROGRAMS / "attached.py"), str(rounds), str(loops)],
        env=processes.environment(RESILIENCE_RUN_DIR=str(context.scratch / "run")),
        cwd=context.scratch,
        stdout=subprocess.PIPE,
        check=True,
        timeout=180,
    )
    found = {
        name: {key: tuple(ns / 1000 for ns in samples) for key, samples in figures.items()}
        for name, figures in json.loads(done.stdout).items()
    }
    one, many, sharded = found["1 layer"], found["500 layers"], found["sharded"]
    return [
        Figure("a step, 2 parameters", "torch", "us", one["step"]),
        Figure("attach adds to it", "ours", "us", one["added"]),
        Figure("a step, 1,000 parameters", "torch", "us", many["step"]),
        Figure("attach adds to it, per 1,000 parameters", "ours", "us", many["added"]),
        Figure("attach() itself, per 1,000 parameters", "ours", "us", many["attach"]),
        Figure("a step, 40 sharded layers (FSDP2, 1 rank)", "torch", "us", sharded["step"]),
        Figure("attach adds per sharded layer", "ours", "us", tuple(us / _SHARDED for us in sharded["added"])),
        Figure("section, tight, while the monitor collects", "ours", "us", found["section"]["added"], _SECTION_US),
    ]
