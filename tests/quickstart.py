"""The quickstart as a program: its files and commands in order; `python -m tests.quickstart` writes what they print.

A ```python block with a title is a file, a ```bash block a command, and a ```text block behind it what that prints.
What differs from machine to machine is told in one way: the directory is `/home/me`, the host `laptop`, and a test
compares with all numbers left out.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import resilience_sdk

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
HOME = "/home/me"
_BLOCK = re.compile(r"^```(?P<kind>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_INSTALLS = "python -m pip install"
_NUMBER = re.compile(r"\d+(\.\d+)?")
# How many of these there are depends on how busy the machine is: also the traceback of a rank whose peer has died,
# which comes only where torch is faster than the launcher's signal.
NOTICE = re.compile(r"resilience: (no progress for|went on after|rank \d+ has not ended) |\[rank\d+\]:")
# So does where the time went.
_SUMMARY = re.compile(r"(?<=^resilience: )(time|worth a look): .*")
_TIMEOUT_S = 200


def replayed(page: str, directory: Path) -> str:
    """Return the page with what its commands print here."""
    return _BLOCK.sub(_Replay(directory), page)


class _Replay:
    """Takes the blocks of a page one after the other, and returns each as it is to stand there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._printed = ""

    def __call__(self, block: re.Match[str]) -> str:
        kind, options, text = block["kind"], block["options"], block["text"]
        if kind == "python":
            (self._directory / re.findall(r'title="(.*?)"', options)[0]).write_text(text)
        elif kind == "bash":
            self._printed = "" if text.startswith(_INSTALLS) else _output(text, self._directory)
        elif kind == "text":
            return f"```text\n{self._printed}```"
        return block[0]


def _output(command: str, directory: Path) -> str:
    """Return what a command prints, with the names of the page for those of this machine."""
    programs = str(Path(sys.executable).parent)
    root = str(Path(resilience_sdk.__file__).parent.parent)
    environment = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={**environment, "OMP_NUM_THREADS": "1"},  # else the first line says that it is set
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    names = {str(directory): HOME, root: f"{HOME}/.venv/lib/python3.12/site-packages"}
    printed = done.stdout
    for found, shown in names.items():
        printed = printed.replace(found, shown)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", printed)


def outputs(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page with the lines that it prints, numbers left out and notices as well.

    Lines of two ranks and of the launcher may change places, so they are sorted.
    """
    command = ""
    for block in _BLOCK.finditer(page):
        if block["kind"] == "bash":
            command = block["text"].strip()
        elif block["kind"] == "text":
            lines = [line.strip() for line in block["text"].splitlines() if not NOTICE.match(line)]
            yield command, sorted({_NUMBER.sub("N", _SUMMARY.sub(r"\1: ...", line)) for line in lines} - {""})


def main() -> None:
    """Write what the commands print into the page."""
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(replayed(PAGE.read_text(), Path(directory).resolve()))


if __name__ == "__main__":
    main()
