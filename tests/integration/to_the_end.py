"""Runs things to their end: jobs of two ranks under our launcher, and whatever a user starts outside of any job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
from harness import PROJECT, Job, job


@attrs.frozen
class Ended:
    """What a job has left behind."""

    code: int
    run: Job
    screen: str

    def told(self, name: str, attempt: int = 0) -> list[Any]:
        """Return what each rank has told under that name."""
        return [json.loads(path.read_text()) for path in self.run.told(f"{name}-{attempt}-[0-9]")]


def ended(
    folder: Path, script: str, *args: object, timeout_s: float = 180.0, framework: str | None = None, **env: str
) -> Ended:
    """Run a script of ours on two ranks to its end; `framework` as `job` takes it."""
    folder.mkdir(exist_ok=True)
    with job(folder, "--nproc-per-node", "2", script, *map(str, args), env=env, framework=framework) as run:
        return Ended(run.finish(timeout_s), run, run.screen)


def output_of(folder: Path, *words: object, without: tuple[str, ...] = (), **env: str) -> str:
    """Run Python in a directory, as a user outside of any job, until it ends well; return all output.

    `without`: beginnings of more variables that it must not see.
    """
    unseen = ("RESILIENCE_", "SLURM_", *without)
    own = {name: value for name, value in os.environ.items() if not name.startswith(unseen)}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=own | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"} | env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
