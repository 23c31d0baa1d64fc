"""The file system of a run directory: where another one is in its place, nothing is written.

A mount that goes away while a job runs leaves an empty directory, or none, on the disk below it. What is written there
is found by nobody once the mount is back, and a training that begins anew in it has lost all that it had.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_devices: dict[str, int] = {}  # of the run directories that this process has to do with


def remember(directory: str | os.PathLike[str], device: int | None = None) -> int | None:
    """Note on which device a run directory is, as the process that began the job says or as it is now; return that.

    None, and nothing is noted, where there is no directory.
    """
    try:
        known = os.stat(directory).st_dev if device is None else device
    except OSError:
        return None
    _devices[os.path.abspath(directory)] = known
    return known


def check(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a run directory, or what lies below one, is on another device than when the job began.

    A directory that is missing counts as that in which it would be made.
    """
    name = os.path.abspath(path)
    for directory, device in _devices.items():
        if name == directory or name.startswith(directory + os.sep):
            if _device_of(directory) not in (device, None):
                raise OSError(errno.ESTALE, "another file system is there than when the job began", directory)
            return


def _device_of(directory: str) -> int | None:
    """Return the device of a directory or the next one above that is there; None where nobody can say."""
    for place in (Path(directory), *Path(directory).parents):
        try:
            return os.stat(place).st_dev
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
