"""SIGKILL of a rank -> every rank has completed its first DDP step again, under three launchers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import processes
from tests.bench.figures import Context, Figure

RANKS = 2
_TARGET_S = 0.5
_BOUND_S = 60.0


def measure(context: Context) -> list[Figure]:
    """Kill rank 1 several times in one job, per launcher."""
    kills = context.repeats(5, 2)
    options = [f"--nproc-per-node={RANKS}", f"--max-restarts={kills + 1}"]
    figures = _under(
        "ours",
        processes.resilience_run(f"--run-dir={context.scratch / 'run'}", *options),
        context.scratch / "ours",
        kills,
        _TARGET_S,
    )
    figures += _under("torchrun", processes.torchrun(*options), context.scratch / "torchrun", kills, None)
    if context.nvrx_python is not None:
        command = processes.nvrx_launcher(context.nvrx_python, *options, "--ft-param-log_level=WARNING")
        figures += _under("nvrx", command, context.scratch / "nvrx", kills, None)
    return figures


def _under(system: str, launcher: Sequence[str], out: Path, kills: int, target: float | None) -> list[Figure]:
    out.mkdir(parents=True)
    program = [str(processes.PROGRAMS / "dying.py"), str(out), str(kills)]
    code = processes.run([*launcher, *program], processes.environment(), out.with_suffix(".log"), _BOUND_S)
    lives = [_read(path) for path in out.glob("steps-*.json")]
    struck = [_read(out / f"kill-{number}.json") for number in range(len(list(out.glob("kill-*.json"))))]
    recoveries, imports = _recoveries(lives, struck)
    note = f"{len(recoveries)} of {len(struck)} recovered"
    if len(struck) < kills or code != 0:
        ending = f"exit code {code}" if code is not None else f"stuck, ended after {_BOUND_S:.0f} s"
        note += f"; {ending}"
    missed = target is not None and len(recoveries) < kills
    return [
        Figure("restart to first step", system, "s", recoveries, 0.0 if missed else target, note=note),
        Figure("  of it: imports of the script", system, "s", imports),
    ]


def _recoveries(
    lives: Sequence[Mapping[str, Any]], struck: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return, per kill after which every rank stepped again, the time to it and the longest import in it."""
    recoveries, imports = [], []
    for number, moment in enumerate(struck):
        end = struck[number + 1] if number + 1 < len(struck) else float("inf")
        after = [life for life in lives if moment < life["first_step"] < end]
        if {life["rank"] for life in after} == set(range(RANKS)):
            recoveries.append(max(life["first_step"] for life in after) - moment)
            imports.append(max(life["imported"] - life["started"] for life in after))
    return tuple(recoveries), tuple(imports)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())
