"""Starts a Lightning training on two gloo ranks, and asks it to leave by a signal to some of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.integration.harness import job

FOREVER = 10_000_000
TARGETS = ((0,), (1,), (0, 1))
_SCRIPT = "lightning_preempted.py"
_RANKS = ("--nproc-per-node", "2")


@attrs.frozen
class Left:
    """What came of a signal. `code` is None where the job did not end in time, which then was killed."""

    began: int
    stopped: tuple[int, int]
    """Completed steps of each rank."""
    code: int | None
    screen: str


def told(folder: Path, name: str) -> Any:
    """Return what a script has told, None if nothing."""
    path = folder / "told" / name
    return json.loads(path.read_text()) if path.exists() else None


def leave(
    folder: Path,
    ranks: Sequence[int],
    command: tuple[str, ...] | None = None,
    patience_s: float = 30.0,
    options: tuple[str, ...] = _RANKS,
    **env: str,
) -> Left:
    """Run until both ranks train, send SIGTERM to `ranks`, and wait for the end."""
    _forget(folder)
    with job(folder, *options, _SCRIPT, str(FOREVER), command=command, env=env) as run:
        run.wait(lambda: _is_under_way(folder), "both ranks to train")
        for rank in ranks:
            os.kill(told(folder, f"start-{rank}")["pid"], signal.SIGTERM)
        try:
            code: int | None = run.finish(patience_s)
        except AssertionError:
            code = None
        first, second = (told(folder, f"step-{rank}")["step"] for rank in (0, 1))
        return Left(told(folder, "start-0")["step"], (first, second), code, run.screen)


def run_to(folder: Path, steps: int, patience_s: float = 60.0) -> str:
    """Run to the end of so many steps; return the digest that both ranks have come to."""
    _forget(folder)
    with job(folder, *_RANKS, _SCRIPT, str(steps)) as run:
        assert run.finish(patience_s) == 0, run.screen
        assert (run.run_dir / "finished").exists()
        [digest] = {told(folder, f"end-{rank}")["digest"] for rank in (0, 1)}
        return str(digest)


def _forget(folder: Path) -> None:
    for path in folder.glob("told/*"):
        path.unlink()


def _is_under_way(folder: Path) -> bool:
    """Tell whether both ranks have made some steps of this attempt."""
    starts, steps = ([told(folder, f"{name}-{rank}") for rank in (0, 1)] for name in ("start", "step"))
    if not (all(starts) and all(steps)):
        return False
    return all(now["step"] >= start["step"] + 5 for start, now in zip(starts, steps, strict=True))
