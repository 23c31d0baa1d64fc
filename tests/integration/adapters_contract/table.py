"""The adapters that the contract suite runs: those whose script says what it needs, in `CONTRACT`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import attrs

_SCRIPTS = Path(__file__).parents[1] / "scripts"
_PREFIX = "adapter_"


@attrs.frozen
class Adapter:
    """One adapter, with the names of its own; `CONTRACT` of its script has all but the first."""

    name: str
    """Its script is `scripts/adapter_<name>.py`."""
    module: str
    """What must be importable."""
    package: str
    """What brings it: `pip install <package>`."""
    forward: str = "fwd"
    backward: str = "bwd"
    optimizer: str = "optim"
    data: str = "data"
    """Its names of the sections."""
    saves_in_background: bool = True
    """Whether its framework has a seam for that."""


def _told_by(script: Path) -> dict[str, Any] | None:
    """Return the `CONTRACT` of a script, which is read and not run: its framework may be missing."""
    for line in ast.parse(script.read_text()).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "CONTRACT":
            return dict(ast.literal_eval(line.value))
    return None


ADAPTERS = tuple(
    Adapter(script.stem.removeprefix(_PREFIX), **told)
    for script in sorted(_SCRIPTS.glob(f"{_PREFIX}*.py"))
    if (told := _told_by(script)) is not None
)
