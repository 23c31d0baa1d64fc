"""What stands still and what works, with the settings as they are: when it is noticed, when it is called hung, and if.

Each cell is a job of its own of `tests/integration/scripts/standing.py`, many of them side by side: who stands still
disturbs nobody. What works does so beside two busy loops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from resilience_sdk.core.journal import read_journal
from tests.bench import processes
from tests.bench.figures import Context, Figure

SCRIPT = processes.ROOT / "tests" / "integration" / "scripts" / "standing.py"
TIERS = ("plain", "blocks", "adapter")
PLACES = ("start", "20", "500", "eval2", "save1")
WAYS = ("stop", "sleep", "lock", "gil", "worker")
REPEATED = ("stop@20", "sleep@20", "lock@20", "stop@start")
WORKS_S = 75.0  # longer than `stuck_after`
WORKS = ("compute", "write", "child", "compiling", "loader", "released", "held")
NOTICE_S, VERDICT_S = 25.0, 75.0
_SIDE_BY_SIDE = 20
_PATIENCE_S = 500.0  # of one that is granted 300 s
_BUSY_LOOPS = 2
_POLL_S = 0.1


@attrs.frozen
class Cell:
    """One thing that is done in one tier at one place."""

    tier: str
    what: str
    number: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.tier}-{self.what}-{self.number}"

    @property
    def culprit(self) -> int:
        """The rank that does it."""
        return 0 if self.what.partition("@")[2].startswith(("eval", "save")) else 1


@attrs.frozen
class Seen:
    """What was told of a cell; seconds after it began."""

    cell: Cell
    notice_s: float | None
    verdict_s: float | None
    right: bool
    """Whether the right rank was named with the right words, and nobody else."""


def measure(context: Context) -> list[Figure]:
    """Run all cells, and those that are counted several times."""
    times = context.repeats(20, 1)
    places = ("20",) if context.quick else PLACES
    cells = [Cell(tier, f"{way}@{place}") for tier in TIERS for place in places for way in WAYS]
    cells.sort(key=lambda cell: not cell.what.endswith("start"))  # the longest first
    repeated = [Cell("plain", what, number) for what in REPEATED for number in range(1, times + 1)]
    healthy = [] if context.quick else [*TIERS, "blocks-unnamed"]
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in healthy[:_BUSY_LOOPS]]
    try:
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            seen = list(pool.map(lambda cell: _stands(context, cell), [*cells, *repeated]))
            # Behind the others: a call in C of 75 s of CPU time would take many times that beside 20 jobs.
            working = list(pool.map(lambda tier: _works(context, tier), healthy))
        return _figures(seen[: len(cells)], seen[len(cells) :], times) + _healthy(healthy, working)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _command(folder: Path, tier: str, *todo: str) -> list[str]:
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--run-dir={folder / 'run'}", "--term-grace=0.5"]
    return [*processes.resilience_run(*options), str(SCRIPT), "--tier", tier, *todo]


def _folder(context: Context, name: str) -> tuple[Path, dict[str, str]]:
    folder = context.scratch / "standing" / name
    (folder / "told").mkdir(parents=True)
    return folder, processes.environment(TOLD=str(folder / "told"))


def _stands(context: Context, cell: Cell) -> Seen:
    """Run one job until somebody is called hung in it."""
    folder, env = _folder(context, cell.name)
    fast = ["--steps", "520", "--pause", "0"] if cell.what.endswith("@500") else []
    command = _command(folder, cell.tier, "--attempts", "--beside", *fast, cell.what)
    end = time.monotonic() + _PATIENCE_S
    with processes.started(command, env, folder / "log") as process:
        while not _incidents(folder) and process.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)
    return _seen(folder, cell)


def _incidents(folder: Path) -> list[Path]:
    return sorted(folder.glob("run/incidents/[0-9]*-hang/report.json"))


def _seen(folder: Path, cell: Cell) -> Seen:
    notes = [path.read_text().split() for path in folder.glob("told/*@*-0-*")]
    began = float(notes[0][0]) if notes else float("nan")
    events = list(read_journal(folder / "run" / "journal").events)
    stalls = [event for event in events if event["event"] == "stall"]
    notice_s = next((event["t"] - began for event in stalls if event["t"] >= began), None)
    found = _incidents(folder)
    if not found or not any(event["event"] == "confirmed" for event in events):  # told as we ended it
        return Seen(cell, notice_s, None, False)
    report = json.loads(found[0].read_text())
    cause = "hang_rank_stopped" if cell.what.startswith("stop") else "hang_rank_stuck"
    named = [culprit["rank"] for culprit in report["culprits"]]
    return Seen(cell, notice_s, report["detected_at"] - began, (named, report["cause"]) == ([cell.culprit], cause))


def _figures(cells: Sequence[Seen], repeated: Sequence[Seen], times: int) -> list[Figure]:
    early = [seen for seen in cells if not _is_granted_more(seen.cell)]
    late = [seen for seen in cells if _is_granted_more(seen.cell)]
    figures = _pair("stands still, every cell", early)
    figures += _pair("stands still in the start-up", late, verdict_s=330.0)
    for what in REPEATED:
        of_it = [seen for seen in repeated if seen.cell.what == what]
        figures += _pair(f"stands still, {what} x {times}", of_it)
    return figures


def _is_granted_more(cell: Cell) -> bool:
    """Tell whether it is granted five times `stuck_after`: stuck before the first step."""
    return cell.what.endswith("@start") and not cell.what.startswith("stop")


def _pair(name: str, seen: Sequence[Seen], verdict_s: float = VERDICT_S) -> list[Figure]:
    right = sum(each.right for each in seen)
    wrong = [each.cell.name for each in seen if not each.right]
    note = f"{right} of {len(seen)} named right" + (f"; not {', '.join(wrong[:6])}" if wrong else "")
    notices = tuple(each.notice_s for each in seen if each.notice_s is not None)
    verdicts = tuple(each.verdict_s for each in seen if each.verdict_s is not None)
    complete = right == len(seen)
    return [
        _bounded(f"{name}: noticed", notices, NOTICE_S if len(notices) == len(seen) else -1.0, ""),
        _bounded(f"{name}: called hung", verdicts, verdict_s if complete else -1.0, note),
    ]


def _bounded(name: str, samples: tuple[float, ...], bound: float, note: str) -> Figure:
    """Return a figure whose every sample must keep a bound."""
    kept = all(sample <= bound for sample in samples)
    return Figure(name, "ours", "s", samples, bound if kept else -1.0, bound if kept else -1.0, note)


def _works(context: Context, tier: str) -> str:
    """Run one job in which a rank works for long, once in each way; return what was wrong, or nothing."""
    folder, env = _folder(context, f"works-{tier}")
    if tier == "plain":
        todo: Iterable[str] = [f"{what}@{12 + 2 * number}:{WORKS_S}" for number, what in enumerate(WORKS)]
    else:  # the first evaluation, and those after ten short ones; saves between them
        places = ("eval1", "save1", "eval12", "eval13", "eval14", "eval15", "save8")
        todo = [f"{what}@{place}:{WORKS_S}" for what, place in zip(WORKS, places, strict=True)]
    command = _command(folder, tier, "--steps", "85", *todo)
    code = processes.run(command, env, folder / "log", 3 * WORKS_S * len(WORKS) + 300)
    ended = len(list(folder.glob("told/*@*"))) - len(WORKS)
    events = Counter(event["event"] for event in read_journal(folder / "run" / "journal").events)
    if (code, ended, events["confirmed"], events["attempt_start"]) == (0, 0, 0, 1):
        return ""
    return (
        f"{tier}: exit {code}, {events['confirmed']} called hung, {events['attempt_start']} attempts, "
        f"{-ended} not reached"
    )


def _healthy(tiers: Sequence[str], wrong: Sequence[str]) -> list[Figure]:
    if not tiers:
        return []
    count = sum(1 for text in wrong if text)
    note = f"{len(tiers)} jobs x {len(WORKS)} ways to work for {WORKS_S:g} s beside {_BUSY_LOOPS} busy loops"
    note += "".join(f"; {text}" for text in wrong if text)
    return [Figure("works: jobs ended or called hung", "ours", "jobs", (float(count),), 0.0, note=note)]


def nvrx(context: Context) -> list[Figure]:
    """Let NVRx find a rank that sleeps, with the same time as its deadline: how long that takes it."""
    if context.nvrx_python is None:
        return []
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda number: _nvrx(context, number), range(context.repeats(5, 1))))
    note = "killed; rank_heartbeat_timeout set to 60 s (its default is 2700 s), without notice, names no culprit"
    return [Figure("stands still, sleep: acted upon", "nvrx", "s", tuple(s for s in found if s is not None), note=note)]


def _nvrx(context: Context, number: int) -> float | None:
    folder, env = _folder(context, f"nvrx-{number}")
    config = folder / "nvrx.yaml"
    config.write_text(
        "fault_tolerance:\n  initial_rank_heartbeat_timeout: 300\n  rank_heartbeat_timeout: 60\n  log_level: WARNING\n"
    )
    options = ["--nproc-per-node=2", "--max-restarts=0", f"--ft-cfg-path={config}"]
    program = [str(processes.PROGRAMS / "nvrx_hanging.py"), str(folder)]
    end = time.monotonic() + _PATIENCE_S
    command = processes.nvrx_launcher(str(context.nvrx_python), *options, *program)
    with processes.started(command, env, folder / "log") as process:
        while time.monotonic() < end and process.poll() is None:
            time.sleep(_POLL_S)
            for trace in folder.glob("hung-*.json"):
                hung = json.loads(trace.read_text())
                if not os.path.exists(f"/proc/{hung['pid']}") or _is_zombie(hung["pid"]):
                    return time.monotonic() - float(hung["last_beat"])
    for trace in folder.glob("hung-*.json"):
        return time.monotonic() - float(json.loads(trace.read_text())["last_beat"])
    return None


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
