"""Small file systems of a test's own, which can be filled and freed. Needs root."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place, *options):
    """Mount a file system of 2 MiB at `place` as long as the block lasts; skip the test where that cannot be."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("needs root, to mount small file systems")
    place.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", ",".join(["mode=0700,size=2m", *options]), "tmpfs", str(place)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place, kind="bytes"):
    """Take all that is free: bytes, or the numbers of files."""
    ballast = Path(place) / "ballast"
    ballast.mkdir()
    with contextlib.suppress(OSError):
        if kind == "bytes":
            with open(ballast / "0", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        for number in range(1 << 20):
            (ballast / str(number)).touch()


def free(place):
    """Give it back."""
    ballast = Path(place) / "ballast"
    for path in ballast.iterdir():
        path.unlink()
    ballast.rmdir()
