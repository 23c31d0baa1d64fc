"""What a rank does, where not all ranks do the same: a file beside its page.

A file and not a word of the page: few jobs have roles, and they are declared once.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from resilience_sdk import lanes
from resilience_sdk.errors import ConfigError
from resilience_sdk.settings.parse import plain_name
from resilience_sdk.whole_file import write_whole

SUFFIX = ".role"
_MOST_BYTES = 64


def set_role(name: str) -> None:
    """Say what this rank does, such as `"stage-1"` of a pipeline: only ranks of one role are compared.

    Call it before the first step; on any thread. Who calls it again begins with a new history. Without it the role is
    setting `straggler_role`. Raises ConfigError for a name with other characters than letters, digits and `_.-`, or
    more than 64.
    """
    try:
        role = plain_name(name)
    except ValueError as error:
        raise ConfigError(f"set_role({name!r}): {error}") from None
    if role is None:
        raise ConfigError(f"set_role({name!r}): expected a name, such as 'stage-1'")
    recorder = lanes.recorder()
    if recorder is not None:
        with contextlib.suppress(OSError):  # no room for it: then this rank is compared with all
            write_whole(recorder.page.path.with_suffix(SUFFIX), role)


def role_file(stem: Path) -> Path:
    """Return where the rank whose files have this stem says its role."""
    return stem.with_name(stem.name + SUFFIX)


def read_role(stem: Path) -> str | None:
    """Return the role of the rank whose files have this stem; None where it has not said any."""
    try:
        with open(role_file(stem), encoding="ascii", errors="replace") as file:
            return plain_name(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None
