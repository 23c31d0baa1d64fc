"""Runs a probe script under torchrun and under `resilience run`, and gathers what it saw."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PROJECT = HERE.parent.parent
LAUNCHERS = ("torchrun", "forkserver", "exec")


@attrs.frozen
class Launch:
    """What one launch left behind, by rank."""

    facts: Mapping[str, Any]
    stdout: Mapping[str, str]
    stderr: Mapping[str, str]
    errors: Mapping[str, Any]  # torch's error files
    exit_codes: tuple[int, ...]  # of the ranks that failed, as the agent saw them
    launcher: subprocess.CompletedProcess[str]


def launch(launcher: str, out: Path, arguments: list[str], *, ranks: int, **env: str) -> Launch:
    """Run `arguments` under `launcher` with the probe's folder as working directory."""
    logs, pages = out / "logs", out / "pages"
    pages.mkdir()
    options = ["--standalone", "--max-restarts=0", f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={logs}"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENCE_", "PYTEST_", "COV_"))}
    done = subprocess.run(
        [*command(launcher, out), *options, *arguments],
        cwd=SCRIPTS,
        env={**inherited, "PROBE_OUT": str(out), "PYTHONPATH": str(PROJECT), "RESILIENCE_PAGE_DIR": str(pages), **env},
        input="a line for rank 0\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Launch(
        facts={path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))},
        stdout=_by_rank(logs, "stdout.log"),
        stderr=_by_rank(logs, "stderr.log"),
        errors={rank: json.loads(text) for rank, text in _by_rank(logs, "error.json").items()},
        exit_codes=_exit_codes(done.stderr, out / "run"),
        launcher=done,
    )


def command(launcher: str, out: Path) -> list[str]:
    """Return the command line of a launcher up to its common options; ours keeps its run directory in `out`."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run"]
    return [sys.executable, "-m", "resilience_sdk", "run", "--start-method", launcher, "--run-dir", str(out / "run")]


def launch_all(folder: Path, plan: Mapping[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], Launch]:
    """Run a plan of `(probe, launcher) -> launch's arguments`, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = {}
        for (probe, launcher), arguments in plan.items():
            out = folder / f"{probe}-{launcher}"
            out.mkdir()
            running[probe, launcher] = pool.submit(launch, launcher, out, **arguments)
        return {key: future.result() for key, future in running.items()}


def light_server(folder: Path, code: str = "") -> dict[str, str]:
    """Return variables under which a fork server preloads no torch, and so starts at once, and runs `code` first.

    For tests of what the server does with its workers, whatever is preloaded.
    """
    only_the_server = ["sys.modules['torch'] = None", *code.splitlines()]
    lines = [
        "import sys",
        "if 'forkserver_main' in ' '.join(sys.orig_argv[:4]):",
        *(f"    {line}" for line in only_the_server),
    ]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{PROJECT}"}


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return `path -> (one, other)` for every leaf of two nested dictionaries that is not equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = {}
        for key in sorted({*one, *other}):
            found.update(differences(one.get(key), other.get(key), f"{path}/{key}"))
        return found
    return {} if one == other else {path: (one, other)}


def _exit_codes(screen: str, run_dir: Path) -> tuple[int, ...]:
    """Return what torch's agent says of them, or our journal."""
    journals = [path.read_text() for path in (run_dir / "journal").glob("*-launcher-*")]
    ends = [json.loads(line) for journal in journals for line in journal.splitlines()]
    codes = [code for end in ends if end["event"] == "attempt_end" for code in end["exit_codes"].values()]
    codes += map(int, re.findall(r"^  exitcode\s*:\s*(-?\d+)", screen, re.MULTILINE))
    return tuple(code for code in codes if code)


def _by_rank(logs: Path, name: str) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in sorted(logs.glob(f"*/attempt_0/*/{name}"))}
