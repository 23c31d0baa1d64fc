"""Runs one scenario of the demo under `resilience run`, as its own process, and reads what it left behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilience_sdk import environ
from resilience_sdk.demo.promises import CHECKPOINT_EVERY, RANKS, Outcome, Scenario
from resilience_sdk.incidents import IncidentStore

SCRIPT = Path(__file__).with_name("train.py")
_LONGEST_RUN_S = 240.0
_LONGEST_GOODBYE_S = 20.0
# A demo cannot wait half a minute to see that something is wrong; real runs keep the defaults.
_OPTIONS = {
    "nproc-per-node": RANKS,
    "max-restarts": 1,
    "checkpoint-every": CHECKPOINT_EVERY,
    "timeout-floor": 3,
    "term-grace": 1,
    "monitor-interval": 0.1,
}
# What an outer launcher or job said about itself does not hold for the demo's own.
_FOREIGN_PREFIXES = (environ.PREFIX, "PET_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_FOREIGN = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def run_scenario(scenario: Scenario, directory: Path) -> Outcome:
    """Run the training with the scenario's fault; its output goes to `directory/output.log`.

    One that was asked to leave is started again, as its scheduler would. Raises OSError when the directory cannot be
    written. A run that does not end is ended.
    """
    directory.mkdir(parents=True)
    start = time.monotonic()
    environment = _environment(scenario)
    exit_code, first_exit_code = _start(directory, environment), None
    if scenario.stops:
        first_exit_code = exit_code
        exit_code = _start(directory, {name: value for name, value in environment.items() if name != environ.FAULT})
    return Outcome(
        exit_code=exit_code,
        seconds=time.monotonic() - start,
        results=_results(directory / "results"),
        # On a machine with other work one rank may really be slower, which no promise excludes.
        incidents=tuple(incident for incident in IncidentStore(directory / "run").all() if incident.kind != "slow"),
        first_exit_code=first_exit_code,
    )


def _start(directory: Path, environment: Mapping[str, str]) -> int | None:
    """Run the job once; return its exit code, or None when it did not end by itself."""
    with open(directory / "output.log", "ab") as log:
        process = subprocess.Popen(
            command(directory),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(_LONGEST_RUN_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def command(directory: Path) -> list[str]:
    """Return the command line of a run."""
    options = [f"--{name}={value}" for name, value in _OPTIONS.items()]
    script = [str(SCRIPT), "--out", str(directory / "results")]
    return [
        sys.executable,
        "-m",
        "resilience_sdk",
        "run",
        f"--run-dir={directory / 'run'}",
        *options,
        *script,
    ]


def _environment(scenario: Scenario) -> dict[str, str]:
    inherited = environ.environment()
    env = {
        name: value
        for name, value in inherited.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    package_root = str(Path(__file__).parents[2])  # also from a checkout that is not installed
    env["PYTHONPATH"] = ":".join(filter(None, (package_root, inherited.get("PYTHONPATH", ""))))
    env["OMP_NUM_THREADS"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    env[environ.JOB_ID] = f"demo-{uuid.uuid4().hex[:12]}"
    if scenario.fault is not None:
        env[environ.FAULT] = str(scenario.fault)
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that is still there: politely, so that the launcher takes its ranks along, then not."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LONGEST_GOODBYE_S)
    process.kill()
    process.wait()


def _results(directory: Path) -> Mapping[int, Mapping[str, Any]]:
    found = {}
    for rank in range(RANKS):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = json.loads((directory / f"rank-{rank}.json").read_text())
    return found
