"""Hang -> the culprit is named in a report: how long after the deadline, and with the settings as they are."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import processes, standing
from tests.bench.figures import Context, Figure

DEADLINE_S = 1.0
CULPRIT = 1
_TARGET_S, _TARGET_P95_S = 0.2, 0.5
_POLL_S = 0.002


def measure(context: Context) -> list[Figure]:
    """Let rank 1 hang in each attempt of one job, and look when its report is there."""
    times = context.repeats(20, 4)
    out, run = context.scratch / "trace", context.scratch / "run"
    out.mkdir()
    options = [
        "--nproc-per-node=2",
        f"--max-restarts={times - 1}",
        f"--run-dir={run}",
        f"--heartbeat-timeout={DEADLINE_S}",
        "--initial-heartbeat-timeout=30",
        "--term-grace=0.5",
    ]
    fault = f"hang:rank={CULPRIT},step=8,attempt=any"
    command = [*processes.resilience_run(*options), str(processes.PROGRAMS / "hanging.py"), str(out)]
    latencies: list[float] = []
    wrong: list[str] = []
    seen: set[str] = set()

    def look() -> bool:
        for report in run.glob("incidents/[0-9]*/report.json"):
            if report.parent.name not in seen:
                now = time.monotonic()
                seen.add(report.parent.name)
                entered = struct.unpack("d", (out / f"entered-{CULPRIT}").read_bytes())[0]
                latencies.append(now - entered - DEADLINE_S)
                named = [culprit["rank"] for culprit in json.loads(report.read_text())["culprits"]]
                if named != [CULPRIT] or not report.parent.name.endswith("-hang"):
                    wrong.append(f"{report.parent.name} named {named}")
        return len(seen) >= times

    env = processes.environment(RESILIENCE_FAULT=fault)
    _watch(command, env, context.scratch / "hang.log", look, 20 + 8 * times)
    note = f"{len(latencies) - len(wrong)} of {times} named rank {CULPRIT}"
    complete = len(latencies) == times and not wrong
    if wrong:
        note += f"; {'; '.join(wrong[:3])}"
    target = _TARGET_S if complete else -1.0
    figure = Figure("hang: named after the deadline", "ours", "s", tuple(latencies), target, _TARGET_P95_S, note)
    return [figure, *_nvrx(context, times), *standing.nvrx(context), *standing.measure(context)]


def _watch(command: list[str], env: dict[str, str], log: Path, look: Callable[[], bool], bound_s: float) -> None:
    """Run a command and call `look()` often, until it says that it has seen enough or the time is up."""
    end = time.monotonic() + bound_s
    with processes.started(command, env, log) as process:
        while not look() and process.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S)


def _nvrx(context: Context, times: int) -> list[Figure]:
    if context.nvrx_python is None:
        return []
    times = min(times, 5)
    out, config = context.scratch / "nvrx", context.scratch / "nvrx.yaml"
    out.mkdir()
    config.write_text(
        "fault_tolerance:\n  initial_rank_heartbeat_timeout: 30\n"
        f"  rank_heartbeat_timeout: {DEADLINE_S}\n  log_level: WARNING\n"
    )
    latencies: dict[str, float] = {}

    def look() -> bool:
        for trace in out.glob("hung-*.json"):
            if trace.name not in latencies:
                hung = json.loads(trace.read_text())
                if not _alive(hung["pid"]):
                    latencies[trace.name] = time.monotonic() - hung["last_beat"] - DEADLINE_S
        return len(latencies) >= times

    options = ["--nproc-per-node=2", f"--max-restarts={times - 1}", f"--ft-cfg-path={config}"]
    program = [str(processes.PROGRAMS / "nvrx_hanging.py"), str(out)]
    command = processes.nvrx_launcher(str(context.nvrx_python), *options, *program)
    _watch(command, processes.environment(), context.scratch / "nvrx.log", look, 30 + 20 * times)
    note = "killed after the deadline; names no culprit"
    return [Figure("hang: acted after the deadline", "nvrx", "s", tuple(latencies.values()), note=note)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{pid}")
