"""Reading /proc and /sys: what is not there, or not ours to see, is None or empty, never an exception.

`root` stands before every path, so that a test can show a machine that is not its own.
"""

from __future__ import annotations

from pathlib import Path


def below(root: str, path: str) -> Path:
    """Return the absolute `path` as it lies under `root`."""
    return Path(root) / path.lstrip("/")


def text(path: Path) -> str | None:
    """Return the contents without surrounding blanks, None where they cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Return the whole number in a file, None where there is none (`max`, a negative one for "not known" stays)."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """Return the lines `name value` of a file by name; `separator` as in `str.split`, blanks by default."""
    found = {}
    for line in (text(path) or "").splitlines():
        name, *rest = line.split(separator, 1)
        found[name.strip()] = rest[0].strip() if rest else ""
    return found


def count(path: Path, name: str) -> int | None:
    """Return the whole number in the line `name number` of a file, None where there is none."""
    found = fields(path).get(name, "")
    return int(found) if found.isdecimal() else None


def entries(path: Path) -> list[Path]:
    """Return what a directory holds, by name; nothing where it cannot be listed."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
