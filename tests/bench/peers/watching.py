"""A job with a fault, and what was seen of it: the lines that were printed, who went on, how it ended.

What counts as a name is the same for all: a printed line, after the fault, that has the number of the rank, its line in
the program that failed, or a word for what happened.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from tests.bench import processes
from tests.bench.peers.programs.plan import STRIKE_AT
from tests.bench.peers.systems import Command, Job, System

NAMES = re.compile(
    r"(?:\b|local_)rank\W{0,4}(\d+)\b(?!, size=)"
    r"|\[rank(\d+)\]"
    r"|\[(?:WARNING|ERROR)\] \[RankMonServer\d+@\S+:(\d+)\]"
    r"|\bR(\d+)/N\d+",
    re.IGNORECASE,
)
"""Ways to name a rank; the last two are those of NVRx and of TraceML."""
OF_A_GROUP = re.compile(r"group (\d+): (?:.*(?:failed \(exitcode|Traceback|Error\b))?")
"""With replica groups of one rank each, who fails is whose launcher or process says so."""
LINE = re.compile(r"scene\.py\W{1,3}(?:line )?\d+")
"""The file in which only the rank stands that fails."""
CAUSES = {
    "asleep": re.compile(
        r"\bh[au]ngs?\b|\bstuck\b|\bstall|stands still|time-?out|timed out|heartbeat|no progress", re.IGNORECASE
    ),
    "killed": re.compile(r"SIGKILL|signal 9\b|exitcode: -9", re.IGNORECASE),
    "exception": re.compile(r"sample 4711 is broken"),
    "mismatch": re.compile(r"mismatch|desync|diverge|different collective|not the same", re.IGNORECASE),
}
"""The words for what happened."""

_TAG = "PEERS_JOB"
_KEPT = 400
_TO_THE_FAULT_S = 600.0
_SAID_LATE_S = 2.0
_Stamp = tuple[float, int, int, str]


def watch(system: System, job: Job, limit_s: float) -> dict[str, Any]:
    """Run a job to its end, or for `limit_s` behind the fault, and return what was seen."""
    job.out.mkdir(parents=True)
    lines: list[tuple[float, str]] = []
    tag = uuid.uuid4().hex
    commands = system.commands(job)
    running: list[tuple[Command, subprocess.Popen[str]]] = []
    readers = []
    try:
        for command in commands:
            process = _start(command, job, tag)
            running.append((command, process))
            readers.append(threading.Thread(target=_read, args=(process, command.label, lines), daemon=True))
            readers[-1].start()
        working = [process for command, process in running if not command.serves]
        ended = _wait(working, job, limit_s)
        codes = [process.poll() for process in working]
    finally:
        _end(tag)
        for _, process in running:
            process.wait()
    for reader, (_, process) in zip(readers, running, strict=True):
        reader.join(5)
        _output(process).close()
    hidden = {str(job.out): "OUT", str(job.bin): "BIN", str(job.bin.parent): "ENV", socket.gethostname(): "node"}
    hidden |= {str(Path(__file__).parent / "programs"): "PROGRAMS"}
    return _seen(job, sorted(lines), ended, codes, hidden) | {
        "commands": [hide(" ".join(command.words), hidden) for command in commands]
    }


def _start(command: Command, job: Job, tag: str) -> subprocess.Popen[str]:
    path = f"{job.bin}{os.pathsep}{os.environ['PATH']}"
    more = {_TAG: tag, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""}
    return subprocess.Popen(
        command.words,
        env=processes.environment(**more, **command.environment),
        cwd=job.out,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _read(process: subprocess.Popen[str], label: str, lines: list[tuple[float, str]]) -> None:
    for line in _output(process):
        lines.append((time.monotonic(), label + line.rstrip("\n")))


def _output(process: subprocess.Popen[str]) -> TextIO:
    assert process.stdout is not None
    return process.stdout


def _wait(working: Sequence[subprocess.Popen[str]], job: Job, limit_s: float) -> float | None:
    """Wait for all to end; return when the last did, or None past the limit."""
    end = time.monotonic() + _TO_THE_FAULT_S
    has_struck = False
    while any(process.poll() is None for process in working):
        if not has_struck and (strikes := _strikes(_stamps(job.out))):
            has_struck, end = True, strikes[0] + limit_s
        if time.monotonic() > end:
            return None
        time.sleep(0.02)
    return time.monotonic()


def _end(tag: str) -> None:
    """Kill what is left of a job: its processes have its tag, whatever session they are in."""
    mark = f"{_TAG}={tag}".encode()
    found = True
    while found:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
            except OSError:
                continue
        time.sleep(0.1)


def _stamps(out: Path) -> list[_Stamp]:
    if not (out / "stamps").exists():
        return []
    found = [line.split(" ", 3) for line in (out / "stamps").read_text().splitlines()]
    return [(float(line[0]), int(line[1]), int(line[2]), line[3]) for line in found if len(line) == 4]


def _strikes(stamps: Iterable[_Stamp]) -> list[float]:
    return [moment for moment, _, _, what in stamps if what == "strike"]


def _seen(
    job: Job, lines: Sequence[tuple[float, str]], ended: float | None, codes: list[int | None], hidden: dict[str, str]
) -> dict[str, Any]:
    stamps = _stamps(job.out)
    strikes = _strikes(stamps)
    fault = strikes[0] if strikes else lines[0][0] if lines else 0.0  # all of it where the job did not come so far
    after = [
        (round(moment - fault, 2), hide(text, hidden)) for moment, text in lines if moment >= fault and text.strip()
    ]
    went_on = _went_on(stamps, fault) if strikes else {}
    # What is printed long after all train again is no word on the fault.
    until = (
        max(went_on.values()) + _SAID_LATE_S if went_on and len(went_on) == len(_processes(stamps)) else float("inf")
    )
    of_the_fault = [line for line in after if line[0] <= until]
    return {
        "struck": len(strikes),
        "ranks": _ranks(of_the_fault),
        "line_s": _first(of_the_fault, LINE),
        "cause_s": _first(of_the_fault, CAUSES[job.fault]),
        "restarts": {str(rank): len(pids) - 1 for rank, pids in _processes(stamps).items()},
        "went_on_s": went_on,
        "ended_s": None if ended is None else round(ended - fault, 2),
        "codes": codes,
        "output": cut(after),
    }


def _ranks(lines: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return each rank that was named, with when it first was."""
    first: dict[str, float] = {}
    for moment, text in lines:
        for rank in _named_in(text):
            first.setdefault(rank, moment)
    return first


def _named_in(text: str) -> list[str]:
    if of_a_group := OF_A_GROUP.match(text):
        return [of_a_group[1]] if of_a_group[0] != f"group {of_a_group[1]}: " else []
    return [next(number for number in found.groups() if number is not None) for found in NAMES.finditer(text)]


def _first(lines: Sequence[tuple[float, str]], pattern: re.Pattern[str]) -> float | None:
    return next((moment for moment, text in lines if pattern.search(text)), None)


def _processes(stamps: Iterable[_Stamp]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for _, pid, rank, _ in stamps:
        found.setdefault(rank, set()).add(pid)
    return dict(sorted(found.items()))


def _went_on(stamps: Iterable[_Stamp], fault: float) -> dict[str, float]:
    """Return for each rank when it next completed a step that the fault did not let it."""
    before = {pid for moment, pid, _, what in stamps if moment <= fault and what.startswith("step")}
    first: dict[str, float] = {}
    for moment, pid, rank, what in stamps:
        if moment > fault and what.startswith("step") and (pid not in before or int(what.split()[1]) >= STRIKE_AT):
            first.setdefault(str(rank), round(moment - fault, 2))
    return dict(sorted(first.items()))


def hide(text: str, hidden: dict[str, str]) -> str:
    """Return a text without what is of this machine, and without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for place, name in hidden.items():
        text = re.sub(rf"(?<![\w.]){re.escape(place)}(?!\w)", name, text)
    return text


def cut(lines: Sequence[tuple[float, str]], first: int = 40, last: int = 20) -> list[tuple[float, str]]:
    """Return the first and the last lines, with how many were left out between them; long ones are shortened."""
    short = [(moment, text if len(text) <= _KEPT else f"{text[:_KEPT]} ...") for moment, text in lines]
    if len(short) <= first + last + 1:
        return short
    left_out = len(short) - first - last
    return [*short[:first], (short[first][0], f"... {left_out} lines ..."), *short[-last:]]
