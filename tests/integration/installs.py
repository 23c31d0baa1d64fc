"""Installations of the SDK as users have them: each in an environment of its own, in which no other copy can be found.

Torch and all other packages are those of the environment that runs the tests: its directories are on the path of each
new one, but `.pth` files in them are not read, and so an editable installation there does not exist for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

PROJECT = Path(__file__).parent.parent.parent
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR")
_BUILT_FROM = (
    "resilience_sdk", "adapters", "docs", "examples", "setup.cfg", "setup.py", "pyproject.toml", "mkdocs.yml",
    "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "constraints.txt",
)  # fmt: skip
_BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which it changes
print(build_meta.build_sdist(folder), build_meta.build_wheel(folder))
"""


@attrs.frozen
class Installation:
    """A Python that imports the SDK from below `place`, and the command that pip has made for it."""

    python: Path
    resilience: Path
    place: Path
    environment: dict[str, str]

    def start(self, *words: str | Path, where: Path, **variables: str) -> subprocess.Popen[str]:
        """Start a program of this installation in the directory `where`, its output and errors captured."""
        return subprocess.Popen(
            [str(word) for word in words],
            cwd=where,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str | Path, where: Path, timeout_s: float = 120, **variables: str) -> tuple[int, str, str]:
        """Run such a program and return its exit code, output and errors."""
        process = self.start(*words, where=where, **variables)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return process.returncode, out, err


def copy_of_the_sources(folder: Path) -> Path:
    """Return a copy of what is built from, so that nothing is left in the clone and nothing old is taken from it."""
    sources = folder / "sources"
    sources.mkdir()
    for name in _BUILT_FROM:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif (PROJECT / name).exists():
            shutil.copy(PROJECT / name, sources / name)
    return sources


def build(sources: Path, folder: Path) -> tuple[Path, Path]:
    """Build a source distribution and a wheel, and return where they are."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, folder], cwd=sources, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    sdist, wheel = done.stdout.splitlines()[-1].split()
    return folder / sdist, folder / wheel


def install(kind: str, folder: Path, sources: Path, sdist: Path, wheel: Path) -> Installation:
    """Install the SDK as `kind` says: `editable`, `wheel`, `sdist`, or `target` (`--target` and PYTHONPATH)."""
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=100)
    python = folder / "venv/bin/python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    if kind == "target":
        target = folder / "target"
        _pip(python, "--no-index", "--target", target, wheel)
        for path in [path for shared in _shared() for path in shared.iterdir()]:
            if not (path.suffix == ".pth" or "resilience" in path.name or (target / path.name).exists()):
                (target / path.name).symlink_to(path)
        return Installation(python, target / "bin/resilience", target, {**own, "PYTHONPATH": str(target)})
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in _shared()))
    what = {"editable": ("-e", sources), "wheel": (wheel,), "sdist": (sdist,)}[kind]
    _pip(python, "--no-index", "--no-build-isolation", *what)
    return Installation(python, folder / "venv/bin/resilience", sources if kind == "editable" else site, own)


def _pip(python: Path, *words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "-q", *words],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def _shared() -> list[Path]:
    """Return where this Python has its packages."""
    return [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
