"""The installed package: its place on disk, its versions, and where this process finds what else it imports."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

_NAME = "resilience_sdk"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(PACKAGE)
"""The directory that this process has found the package in."""

# What processes of ours import beyond the standard library, by the names of modules.
_NEEDED = ("attr", "attrs", "pynvml", "structlog", "tomli", "torch", "yaml")


def import_path() -> list[str]:
    """Return where this process finds what it imports: its path without the working directory, and what hooks find."""
    here = ""
    with contextlib.suppress(OSError):  # the working directory may be gone, or its mount dead
        here = os.getcwd()
    is_safe = getattr(sys.flags, "safe_path", False)
    entries = sys.path[0 if is_safe or sys.path[:1] not in ([""], [here]) else 1 :]
    absolute = [os.path.join(here, path) for path in entries if here or os.path.isabs(path)]
    return list(dict.fromkeys([*absolute, *places_of(_NEEDED)]))


def needed_python_path(env: Mapping[str, str]) -> str | None:
    """Return the value of PYTHONPATH in `env` where the package was found by it (`pip install --target`), else None."""
    value = env.get("PYTHONPATH", "")
    entries = [os.path.realpath(path) for path in value.split(os.pathsep) if path]
    if os.path.realpath(ROOT) not in entries:
        return None
    return os.pathsep.join(os.path.abspath(path) for path in value.split(os.pathsep) if path)


def places_of(modules: Iterable[str]) -> list[str]:
    """Return the directories that these top-level modules lie in, without importing them; those not found have none."""
    places: dict[str, None] = {}
    for name in modules:
        with contextlib.suppress(ImportError, ValueError, AttributeError):  # of a hook, of a module that somebody made
            spec = find_spec(name)
            if spec is not None and spec.origin is not None and spec.has_location:
                file = os.path.dirname(spec.origin) if spec.submodule_search_locations is not None else spec.origin
                places[os.path.dirname(os.path.abspath(file))] = None
    return list(places)


def refusal() -> str | None:
    """Say why the SDK cannot work as it is installed and what to do, None where it can."""
    place = PACKAGE
    while not os.path.exists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    if not os.path.isfile(place):
        return None
    return (
        f"{_NAME} was imported from the archive {place}, and starts processes from its files: "
        "install it with pip, or unpack it and put that directory on PYTHONPATH"
    )


_DRIVER = "/proc/driver/nvidia/version"
_VERSIONS_OF = ("torch", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "lightning", "transformers", "accelerate")


def versions() -> dict[str, str]:
    """Return the versions that a job runs with, of what is installed here; nothing is imported."""
    from importlib import metadata

    found = {"kernel": os.uname().release}
    for name in _VERSIONS_OF:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError), open(_DRIVER, encoding="utf-8", errors="replace") as file:
        words = file.readline().split()
        found["nvidia_driver"] = next((word for word in words if word[:1].isdigit()), "unknown")
    return found
