"""How the launcher starts programs of the SDK: by name, in a fresh interpreter, because they are on its own floor."""

from __future__ import annotations

import sys
from pathlib import Path

# Without the current directory on the path, where a user may have a module of the same name as one of a library's;
# last, where our package lies.
_PREPARE = "import os, sys; sys.path[0:1] = []; sys.path.append(sys.argv[1]); "


def command_of(program: str) -> list[str]:
    """Return the command line that runs Python code which has `os` and `sys` and can import this package."""
    return [sys.executable, "-c", _PREPARE + program, str(Path(__file__).resolve().parents[2])]
