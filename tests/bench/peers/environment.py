"""An environment for each peer: torch first, as this project has it, then the peer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.bench import processes
from tests.bench.peers.systems import OURS, System
from tests.integration import installs

_CONSTRAINTS = processes.ROOT / "constraints.txt"
_BOUND_S = 1800
_one_at_a_time = threading.Lock()  # two systems may share one


class CannotInstall(Exception):  # noqa: N818
    """Pip refused; says its words."""


def made(system: System, where: Path) -> Path:
    """Return the directory of the programs of an environment that has this peer; one that is there is used again.

    Raises:
        CannotInstall: Pip could not, in its words.
    """
    with _one_at_a_time:
        return _made(system, where)


def _made(system: System, where: Path) -> Path:
    folder = where / system.slug
    mark = folder / "installed"
    wanted = system.package or "torch"
    if not mark.exists() or mark.read_text() != wanted:
        mark.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=_BOUND_S)
        _pip(folder, "-c", str(_CONSTRAINTS), "torch", "numpy")
        if system.package not in ("", OURS):
            _pip(folder, system.package)
    if system.package == OURS:
        with tempfile.TemporaryDirectory() as scratch:
            sources = installs.copy_of_the_sources(Path(scratch))
            _, wheel = installs.build(sources, Path(scratch))
            _pip(folder, "-c", str(_CONSTRAINTS), str(wheel))
            _pip(folder, "--force-reinstall", "--no-deps", str(wheel))
    mark.write_text(wanted)
    return folder / "bin"


def versions(programs: Path, system: System) -> dict[str, str]:
    """Return the versions of the peer and of torch, as they were installed."""
    names = ["torch"] if not system.package else ["torch", system.package.partition("==")[0]]
    code = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([programs / "python", "-c", code, *names], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _pip(folder: Path, *words: str) -> None:
    command = [folder / "bin" / "python", "-m", "pip", "install", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotInstall("\n".join(errors or done.stderr.splitlines()[-3:]))
