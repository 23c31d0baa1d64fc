"""SIGTERM to one of two Lightning ranks, to the other, to both: how often all is saved, beside Lightning alone."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

from tests.bench.figures import Context, Figure
from tests.integration.lightning_runs import TARGETS, Left, leave

_HUNG_S = 15.0  # Lightning alone ends within a second, or never
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def measure(context: Context) -> list[Figure]:
    """Send each signal as often as is asked for; raises AssertionError when ours has lost something."""
    if importlib.util.find_spec("lightning") is None or importlib.util.find_spec("torchdata") is None:
        return []
    targets = TARGETS * context.repeats(20, 1)
    folder = context.scratch / "asked"
    folder.mkdir()
    took_s, at = [], 0
    for ranks in targets:
        began_s = time.monotonic()
        left = leave(folder, ranks)
        took_s.append(time.monotonic() - began_s)
        assert left.code == 75, left.screen
        assert left.began == at, f"{left.began} instead of {at}: {left.screen}"
        assert _is_saved(folder, left), left.screen
        at = left.stopped[0]
    alone = [_alone(context.scratch / f"alone-{number}", ranks) for number, ranks in enumerate(targets)]
    hung = sum(left.code is None for left in alone)
    return [
        Figure(
            "Lightning, SIGTERM: jobs that hang",
            "ours",
            "of all",
            (0.0,),
            0.0,
            note=f"{len(targets)} stops behind one step, {len(targets)} saved and resumed there; "
            f"a start, some steps and the stop took {max(took_s):.0f} s at most",
        ),
        Figure(
            "Lightning, SIGTERM: jobs that hang",
            "Lightning alone",
            "of all",
            (hung / len(alone),),
            note=f"{hung} of {len(alone)} did not end within {_HUNG_S:g} s; none saves",
        ),
    ]


def _alone(folder: Path, ranks: tuple[int, ...]) -> Left:
    folder.mkdir()
    return leave(folder, ranks, _TORCHRUN, _HUNG_S, LIGHTNING_ALONE="1")


def _is_saved(folder: Path, left: Left) -> bool:
    names = os.listdir(folder / "run" / "checkpoints")
    return left.stopped[0] == left.stopped[1] and f"step-{left.stopped[0]:08d}" in names
