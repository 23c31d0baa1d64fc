"""Resumes that are exact, over and over, and those of data that are random on purpose: nothing may be found in them.

And what a restart and resume takes, from the kill to the first step, beside that of another commit, in turns.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.bench import processes
from tests.bench.figures import Context, Figure
from tests.integration.harness import Job, job

_KILLS = {
    ("start_run", "same"): 150,
    ("attach", "same"): 50,
    ("accelerate", "same"): 30,
    ("lightning", "same"): 30,
    ("transformers", "same"): 30,
    ("start_run", "random"): 50,
    ("accelerate", "random"): 10,
    ("lightning", "random"): 10,
    ("transformers", "random"): 10,
}
_FRAMEWORKS = {way: way for way in ("accelerate", "lightning", "transformers")}
_QUICK = 3
_TURNS, _KILLS_A_TURN = 5, 4
_EACH_S = 20.0  # far above what an attempt takes


def measure(context: Context) -> list[Figure]:
    """Kill one training of each kind again and again; raises AssertionError where one does not come to its end."""
    kinds = [(way, data, context.repeats(kills, _QUICK)) for (way, data), kills in _KILLS.items()]
    figures = [_findings(context.scratch, way, data, kills) for way, data, kills in kinds]
    return figures + ([] if context.before is None else _restarts(context, context.before))


def _findings(scratch: Path, way: str, data: str, kills: int) -> Figure:
    with _struck(scratch / f"{way}-{data}", way, data, kills, framework=_FRAMEWORKS.get(way)) as run:
        found = run.events("resume_not_exact")
        resumes = len(run.events("resume"))
        assert resumes == kills, f"{resumes} resumes after {kills} kills"
        note = "; ".join(str(event.get("text")) for event in found[:3]) or _seen(run)
    name = f"findings in {resumes} resumes by {way}, data {'random on purpose' if data == 'random' else 'the same'}"
    return Figure(name, "ours", "", (float(len(found)),), 0.0, note=note)


def _restarts(context: Context, before: Path) -> list[Figure]:
    """Return the times of both commits; that of this one may be a twentieth, or 10 ms, above the other's."""
    times: dict[str, list[float]] = {"before": [], "ours": []}
    for turn in range(context.repeats(_TURNS, 1)):
        for system, tree in (("before", before), ("ours", processes.ROOT)):
            with _struck(context.scratch / f"{system}-{turn}", "start_run", "same", _KILLS_A_TURN, tree) as run:
                times[system] += _recoveries(run)
    bound = max(1.05 * statistics.median(times["before"]), statistics.median(times["before"]) + 0.01)
    name = "kill to the first step behind the resume"
    return [
        Figure(name, system, "s", tuple(found), bound if system == "ours" else None) for system, found in times.items()
    ]


def _recoveries(run: Job) -> list[float]:
    moments = {path.name: float(path.read_text()) for path in run.told("*")}
    return [moments[f"first-{number + 1}"] - moments[f"killed-{number}"] for number in range(_KILLS_A_TURN)]


@contextlib.contextmanager
def _struck(
    folder: Path, way: str, data: str, kills: int, tree: Path = processes.ROOT, framework: str | None = None
) -> Iterator[Job]:
    """Run a training of that tree to its end, through so many kills. `framework`: what its ranks need not import."""
    folder.mkdir()
    program = [str(processes.PROGRAMS / "struck.py"), way, data, str(kills)]
    how = {} if framework is None else {"framework": framework, "forked": True}
    with job(folder, f"--max-restarts={kills + 1}", *program, env={"PYTHONPATH": str(tree)}, **how) as run:
        assert run.finish(60.0 + _EACH_S * kills) == 0, run.screen
        yield run


def _seen(run: Job) -> str:
    """Return what was compared in these resumes, in words."""
    checks = run.events("resume_check")
    counts = {
        what: [check["result"] for check in checks if check["what"] == what] for what in ("state", "order", "steps")
    }
    return ", ".join(f"{what}: {results.count('exact')} of {len(results)} exact" for what, results in counts.items())
