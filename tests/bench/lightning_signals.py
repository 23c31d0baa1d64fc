"""SIGTERM to one of two Lightning ranks, to the other, to both: how often all is saved, beside Lightning alone."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

from tests.bench.figures import Context, Figure
from tests.integration.lightning_runs import TARGETS, Left, leave, run_to

_HUNG_S = 15.0  # Lightning alone ends within a second, or never
_WHOLE_S = 600.0  # for all the steps between 60 stops, in one go
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
    in_one_go = context.scratch / "never-asked"
    in_one_go.mkdir()
    ends = [run_to(each, at + 20, _WHOLE_S) for each in (folder, in_one_go)]
    assert ends[0] == ends[1], "stopped and resumed, the training ends elsewhere"
    alone = _alone_often(context)
    hung = sum(left.code is None for left in alone)
    return [
        Figure(
            "Lightning, SIGTERM: jobs that hang",
            "ours",
            "of all",
            (0.0,),
            0.0,
            note=f"{len(targets)} stops behind one step, {len(targets)} saved and resumed there; step {at + 20} is "
            f"bit-equal to that of a run in one go; a start, some steps and the stop took {max(took_s):.0f} s at most",
        ),
        Figure(
            "Lightning, SIGTERM: jobs that hang",
            "Lightning alone",
            "of all",
            (hung / len(alone),),
            note=f"{hung} of {len(alone)} did not end within {_HUNG_S:g} s; none saves",
        ),
    ]


def _alone_often(context: Context) -> list[Left]:
    """Leave out what did not even start in time: it tells nothing of signals, and costs the others nothing."""
    found = []
    for number, ranks in enumerate(TARGETS * context.repeats(5, 1)):
        try:
            found.append(_alone(context.scratch / f"alone-{number}", ranks))
        except AssertionError as late:
            print(f"  Lightning alone, start {number}: {str(late).splitlines()[0]}", file=sys.stderr, flush=True)
    return found


def _alone(folder: Path, ranks: tuple[int, ...]) -> Left:
    folder.mkdir()
    return leave(folder, ranks, _TORCHRUN, _HUNG_S, LIGHTNING_ALONE="1")


def _is_saved(folder: Path, left: Left) -> bool:
    names = os.listdir(folder / "run" / "checkpoints")
    return left.stopped[0] == left.stopped[1] and f"step-{left.stopped[0]:08d}" in names
