"""How long a save holds the training up: at once, and written in the background."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bench import processes
from tests.bench.figures import Context, Figure


def measure(context: Context) -> list[Figure]:
    """Measure both kinds in one process, on one model, beside its training step."""
    saves, megabytes = context.repeats(9, 3), context.repeats(300, 60)
    found = json.loads(
        subprocess.run(
            [sys.executable, str(processes.PROGRAMS / "saving.py"), "run", str(saves), str(megabytes)],
            env=processes.environment(),
            cwd=context.scratch,
            stdout=subprocess.PIPE,
            check=True,
            timeout=300,
        ).stdout
    )
    note = f"{found['megabytes'][0]:.0f} MB of parameters and AdamW"
    names = {
        "at once": "save, stall",
        "background": "save in the background, stall",
        "background, until committed": "save in the background, until committed",
        "steps": "training step of that model",
        "steps beside": "training step while it is written",
    }
    return [
        Figure(name, "ours", "ms", tuple(1000 * seconds for seconds in found[key]), note=note)
        for key, name in names.items()
    ]
