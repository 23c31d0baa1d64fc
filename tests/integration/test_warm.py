"""A launcher that is forked from the warm process of the tests cannot be told from a fresh one."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import warm
from harness import PROJECT, job

pytestmark = pytest.mark.slow

PROBE = PROJECT / "tests" / "conformance" / "scripts" / "guarded.py"


def shown(pid: int) -> dict[str, object]:
    """Return what others see of a process."""
    proc = Path(f"/proc/{pid}")
    status = (proc / "status").read_text().splitlines()
    return {
        "command": (proc / "cmdline").read_text().rstrip("\0 ").replace("\0", " "),
        "marks": (proc / "environ").read_bytes().count(f"{warm.MARK}=".encode()),
        "leads": [os.getsid(pid) == pid, os.getpgid(pid) == pid],
        "streams": [os.readlink(proc / "fd" / str(fd)) for fd in range(3)],
        "directory": os.readlink(proc / "cwd"),
        "program": os.readlink(proc / "exe"),
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn"))],
    }


def launched(folder: Path, *, fresh: bool) -> dict[str, object]:
    """Run the probe of the conformance tests on two ranks, then a job whose launcher is killed; return all facts."""
    folder.mkdir()
    probe = (PROBE, "two words", "ünï")
    with job(folder, "--nproc-per-node", "2", *probe, env={"PROBE_OUT": str(folder)}, fresh=fresh) as run:
        assert isinstance(run.process, warm.WarmProcess) is not fresh
        facts = {"code": run.finish(), "out": sorted(run.out)}  # of two ranks, in whatever order
    for rank in ("0", "1"):
        facts[rank] = json.loads((folder / f"{rank}.json").read_text())
        del facts[rank]["draws"]
    with job(
        folder, "--fresh", "--nproc-per-node", "2", "training.py", "--until", str(folder / "end"), fresh=fresh
    ) as run:
        run.wait(lambda: len(run.told("step-0-*")) == 2, "a step")
        processes = run.processes()
        (server,) = [pid for pid, command in processes.items() if "forkserver_main" in command]
        ranks = [int(run.told(f"rank-0-{rank}")[0].read_text()) for rank in (0, 1)]
        facts["seen"] = [shown(pid) for pid in (run.process.pid, server, *ranks)]
        facts["processes"] = len(processes)
        run.process.kill()
        facts["killed"] = run.process.wait(20.0)
        facts["left"] = [left for left in run.left_behind() if "page" not in left]
    return alike(facts, folder)


def alike(facts: dict[str, object], folder: Path) -> dict[str, object]:
    """Leave out what differs between any two launches."""
    text = json.dumps(facts).replace(str(folder), "FOLDER")
    text = re.sub(r"fault-test-[0-9a-f]{32}|\d+ \d+(?= fork )|\d+(?=\.(?:fifo|stack|jsonl|page))", "-", text)
    own = "MASTER_PORT|TORCHELASTIC_RUN_ID|TORCHELASTIC_ERROR_FILE|RESILIENCE_INTERNAL_[A-Z_]+"
    return json.loads(re.sub(rf'("(?:{own}|{warm.MARK})": )"(?:[^"\\]|\\.)*"', r"\1null", text))


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return both values of every leaf that is not equal."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        parts = [differences(one.get(key), other.get(key), f"{path}/{key}") for key in one | other]
        return {leaf: both for part in parts for leaf, both in part.items()}
    return {} if one == other else {path: (one, other)}


def test_launcher_server_and_ranks_are_those_of_a_fresh_launcher(tmp_path):
    """Streams, signals, sessions, command lines, environment, what the ranks see, and the end of all by SIGKILL."""
    fresh, forked = launched(tmp_path / "a", fresh=True), launched(tmp_path / "b", fresh=False)
    assert differences(fresh, forked) == {}


def test_what_is_read_when_a_process_starts_needs_a_fresh_launcher(tmp_path):
    """Another number of OpenMP's threads, another allocator."""
    with job(tmp_path, "--help", env={"OMP_NUM_THREADS": "3"}) as run:
        assert not isinstance(run.process, warm.WarmProcess)
        assert run.finish() == 0


def test_mistakes_end_as_ever(tmp_path):
    """The process that waits to become the fork server goes with its launcher."""
    with job(tmp_path, "--no-such-option") as run:
        assert isinstance(run.process, warm.WarmProcess)
        assert run.finish() == 2
        assert run.left_behind() == []
