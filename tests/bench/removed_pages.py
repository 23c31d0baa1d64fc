"""A page directory is removed at random moments of a training, and a rank is then signalled: what must hold then.

Ten jobs each for SIGTERM, SIGSTOP and SIGKILL: the settings stand, the stop is agreed (75), no step is lost beyond the
last checkpoint, and the stopped rank is named. The figures are times; a promise that does not hold ends the
measurement with what was seen.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from tests.bench.figures import Context, Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import removed_pages as scene

SEED = 15
_CHECKS = {
    "SIGTERM": ("agreed stop, 75", scene.check_agreed_stop),
    "SIGSTOP": ("named, restarted, resumed", scene.check_named),
    "SIGKILL": ("named, restarted, resumed", scene.check_killed),
}


def measure(context: Context) -> list[Figure]:
    """Remove and signal, over and over; raises AssertionError where a promise does not hold."""
    rng = random.Random(SEED)
    return [_measure(context, name, rng) for name in _CHECKS]


def _measure(context: Context, name: str, rng: random.Random) -> Figure:
    words, check = _CHECKS[name]
    took = []
    for number in range(context.repeats(10, 1)):
        folder = context.scratch / f"{name}-{number}"
        folder.mkdir()
        with scene.training(folder) as run:
            scene.remove(run, rng.uniform(0.0, 3.0), everything=rng.random() < 0.5)
            began = time.monotonic()
            check(run)
            took.append(time.monotonic() - began)
            scene.check_told_once(run)
            assert scene.newest_step(run)
    return Figure(f"page directory removed, then {name}: {words}", "ours", "s", tuple(took), note="nothing lost")
