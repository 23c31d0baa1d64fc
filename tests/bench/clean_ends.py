"""Short programs that destroy their process group, by each way in: they end with 0, and we have nothing to say.

What ends a process badly (a thread of ours in a call of torch, an exit handler in the wrong order) does so now and then
only, so each way is run many times. The figures are the programs that did not end like that, and what one takes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

from tests.bench.figures import Context, Figure
from tests.bench.processes import PROGRAMS, environment, resilience_run, run, torchrun

_PROGRAM = str(PROGRAMS / "clean_end.py")
_PYTHON = [sys.executable, _PROGRAM]
_TWO = ("--nproc-per-node", "2")
WAYS: Mapping[str, list[str]] = {
    "python, heartbeat": [*_PYTHON, "heartbeat"],
    "python, start_run": [*_PYTHON, "run"],
    "resilience run": [*resilience_run(*_TWO), _PROGRAM, "heartbeat"],
    "torchrun": [*torchrun(*_TWO), _PROGRAM, "heartbeat"],
}
# What the launcher always tells of a job that finishes.
_LAUNCHERS_WORDS = ("finished: all ranks exited with 0 (exit code 0)", "time: ", "worth a look: ", "run directory")
_TIMEOUT_S = 120.0


@attrs.frozen
class End:
    """How one program ended: its exit code (None: it had to be ended), and our lines on its standard error."""

    code: int | None
    ours: tuple[str, ...]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether it ended with 0 and we had nothing to say."""
        return self.code == 0 and not self.ours


def end_of(way: str, scratch: Path) -> End:
    """Run the program once, in a directory of its own under `scratch`, and tell how it ended."""
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    env = environment(RESILIENCE_RUN_DIR=str(folder / "run"))
    began = time.monotonic()
    code = run(WAYS[way], env, folder / "log", _TIMEOUT_S)
    seconds = time.monotonic() - began
    lines = (folder / "log").read_text(errors="replace").splitlines()
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)  # a monitor may write its last line
    return End(code, tuple(line for line in lines if _is_ours(line, way)), seconds)


def _is_ours(line: str, way: str) -> bool:
    words = line.removeprefix("resilience: ")
    expected = way == "resilience run" and words.startswith(_LAUNCHERS_WORDS)
    return words != line and not expected


def measure(context: Context) -> list[Figure]:
    """Run each way in so often."""
    figures = []
    for way in WAYS:
        ends = [end_of(way, context.scratch / way.replace(", ", "-")) for _ in range(context.repeats(100, 10))]
        bad = [end for end in ends if not end.is_clean]
        note = f"of {len(ends)}" + (f"; the first: exit code {bad[0].code}, {bad[0].ours}" if bad else "")
        figures += [
            Figure(f"unclean ends, {way}", "ours", "programs", (float(len(bad)),), target=0.0, note=note),
            Figure(f"start to end, {way}", "ours", "s", tuple(end.seconds for end in ends)),
        ]
    return figures
