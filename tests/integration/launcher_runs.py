"""Runs the launcher as a user does, as a process of its own, and gathers what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs

PROJECT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")


@attrs.define
class Run:
    """One launcher process; `finish` waits for its end."""

    process: subprocess.Popen[str]
    run_dir: Path
    pages: Path
    out: str = ""
    err: str = ""

    def finish(self, timeout: float = 60) -> int:
        """Wait for the launcher and return its exit code; what it printed is in `out` and `err`."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"the launcher did not end:\n{self.out}\n{self.err}") from None
        return self.process.returncode

    def wait_for(self, path: Path, timeout: float = 40) -> str:
        """Wait until a file of the script is there and return its text."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if path.exists() and (text := path.read_text()):
                return text
            time.sleep(0.01)
        self.process.kill()
        raise AssertionError(f"{path} did not appear:\n{self.process.communicate()}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the launcher's journal events of that name, in order."""
        lines = [
            json.loads(line)
            for path in sorted((self.run_dir / "journal").glob("*-launcher-*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return [line for line in lines if line["event"] == name]

    def incidents(self) -> list[dict[str, Any]]:
        """Return all incident reports."""
        return [json.loads(p.read_text()) for p in sorted((self.run_dir / "incidents").glob("[0-9]*/report.json"))]

    def outcome(self) -> dict[str, Any]:
        """Return `outcome.json`."""
        data: dict[str, Any] = json.loads((self.run_dir / "outcome.json").read_text())
        return data

    def left_pages(self) -> list[str]:
        """Return what is left in the page directory of the job."""
        return [str(path) for path in self.pages.glob("resilience-*/*")]


def launch(tmp_path: Path, *args: str, env: dict[str, str] | None = None, run_dir: Path | None = None) -> Run:
    """Start `resilience run` with these arguments in `tmp_path`."""
    run_dir = run_dir or tmp_path / "run"
    pages = tmp_path / "pages"
    pages.mkdir(exist_ok=True)
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own |= {"PYTHONPATH": str(PROJECT), "RESILIENCE_PAGE_DIR": str(pages), "PROBE_OUT": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk.launcher", "--run-dir", str(run_dir), *args],
        cwd=SCRIPTS,
        env=own | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Run(process, run_dir, pages)


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def end(run: Run, number: int = signal.SIGTERM) -> None:
    """Send a signal to the launcher alone."""
    run.process.send_signal(number)
